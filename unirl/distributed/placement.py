# SPDX-License-Identifier: Apache-2.0
"""Placement of the slabs: one Ray bundle a node, on as many nodes as the recipe says, workers in order over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unirl.config import RunConfig
from unirl.distributed import failpoints
from unirl.distributed.cluster import Devices, ask_at_the_end, refusal
from unirl.distributed.pinning import check_pinning

RESERVE_TIMEOUT_S = 10.0
"""What another job that is just ending may take to give its devices back."""


class Placement:
    """Where each of `num_devices` workers goes. The first ones are the training slab, the others the rollout slab.

    Workers fill a node before the next, so a slab is on as few nodes as possible.
    """

    def __init__(
        self, config: RunConfig, devices: Devices, group: PlacementGroup, shares: Sequence[int]
    ) -> None:
        self._config = config
        self._devices = devices
        self._group = group
        self._bundle_of = [bundle for bundle, share in enumerate(shares) for _ in range(share)]

    def place(self, index: int) -> int:
        """The number of worker `index` among those on its node."""
        return index - self._bundle_of.index(self._bundle_of[index])

    def options(self, index: int) -> dict[str, Any]:
        """Ray actor options that put worker `index` where it belongs."""
        threads = str(self._config.threads_per_worker)
        variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **failpoints.environment()}
        options: dict[str, Any] = {
            "num_cpus": self._config.threads_per_worker if self._devices.kind == "CPU" else 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle_of[index]
            ),
            "runtime_env": {"env_vars": variables},
        }
        if self._devices.kind == "GPU":
            options["num_gpus"] = 1
        return options


@contextmanager
def placed(config: RunConfig, devices: Devices) -> Iterator[Placement]:
    """Reserves the devices, and gives them back on the way out. Raises `ClusterRefusal` when they are not to be had."""
    check_pinning(config, devices)
    shares = node_shares(config, devices)
    group = placement_group([_bundle(config, devices, share) for share in shares], strategy="STRICT_SPREAD")
    try:
        if not ray.wait([group.ready()], timeout=RESERVE_TIMEOUT_S)[0]:
            free = int(ray.available_resources().get(devices.kind, 0))
            if devices.kind == "CPU":
                free //= config.threads_per_worker
            raise refusal(
                config,
                devices,
                f"of these {free} are free and the others are held by another job, which did not give them back in "
                f"{RESERVE_TIMEOUT_S:.0f} s",
            )
        yield Placement(config, devices, group, shares)
    finally:
        ask_at_the_end(lambda: remove_placement_group(group))


def node_shares(config: RunConfig, devices: Devices) -> list[int]:
    """How many workers go on each of `num_nodes` nodes, largest first: even where it can be, the largest nodes otherwise.

    Raises `ClusterRefusal` when no `num_nodes` nodes hold `num_devices` together.
    """
    rooms = sorted((count for _, count in devices.per_node), reverse=True)[: config.num_nodes]
    if (
        len(rooms) < config.num_nodes
        or sum(rooms) < config.num_devices
        or config.num_devices < config.num_nodes
    ):
        raise refusal(config, devices, f"no {config.num_nodes} node(s) hold {config.num_devices} together")
    shares = [0] * config.num_nodes
    for _ in range(config.num_devices):
        # The emptiest node with room takes the next worker.
        shares[min((s, i) for i, s in enumerate(shares) if s < rooms[i])[1]] += 1
    return shares


def _bundle(config: RunConfig, devices: Devices, share: int) -> dict[str, float]:
    if devices.kind == "GPU":
        return {"GPU": share, "CPU": share}
    return {"CPU": float(share * config.threads_per_worker)}
