# SPDX-License-Identifier: Apache-2.0
"""Placement of the slabs: one bundle a worker, in one Ray placement group."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from unirl.config import RunConfig
from unirl.distributed.cluster import Devices

RESERVE_TIMEOUT_S = 30.0


class Slabs:
    """Reserves `num_devices` bundles; the first ones are the training slab, the others the rollout slab.

    Bundles fill a node before the next (`PACK`), so a slab is on as few nodes as possible.
    """

    def __init__(self, config: RunConfig, devices: Devices) -> None:
        self._config = config
        self._devices = devices
        strategy = "PACK" if config.num_nodes == 1 else "SPREAD"
        self._group = placement_group([self._bundle()] * config.num_devices, strategy=strategy)
        ready, _ = ray.wait([self._group.ready()], timeout=RESERVE_TIMEOUT_S)
        if not ready:
            self.release()
            raise ValueError(
                f"the cluster has {devices.available} {devices.kind} slots ({dict(devices.per_node)}) but did not grant "
                f"{config.num_devices} within {RESERVE_TIMEOUT_S:.0f} s; another job holds them: wait for it or lower num_devices"
            )

    def options(self, index: int) -> dict[str, Any]:
        """Ray actor options that put a worker into bundle `index`."""
        threads = str(self._config.threads_per_worker)
        options: dict[str, Any] = {
            "num_cpus": self._config.threads_per_worker if self._devices.kind == "CPU" else 1,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
        }
        if self._devices.kind == "GPU":
            options["num_gpus"] = 1
        return options

    def release(self) -> None:
        """Gives the bundles back; the workers in them end."""
        remove_placement_group(self._group)

    def _bundle(self) -> dict[str, float]:
        return (
            {"GPU": 1, "CPU": 1}
            if self._devices.kind == "GPU"
            else {"CPU": float(self._config.threads_per_worker)}
        )
