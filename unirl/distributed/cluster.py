# SPDX-License-Identifier: Apache-2.0
"""Starting or joining a Ray cluster, and refusing at once what it cannot give."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from unirl.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Devices:
    """What one worker takes: a GPU where the nodes have any, else `threads` CPU cores."""

    kind: str
    per_node: tuple[tuple[str, int], ...]

    @property
    def available(self) -> int:
        return sum(count for _, count in self.per_node)


def connect(config: RunConfig, *, logs_to_driver: bool = False) -> bool:
    """Starts a cluster of this run's own, or joins the one at `ray_address`; True when it is ours to leave.

    A process that is connected to a cluster already stays with that one.

    A cluster of our own has no dashboard, its own session folder and ports, so that two runs on a host do not meet.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": logs_to_driver,
        "configure_logging": True,
    }
    if config.ray_address:
        ray.init(address=config.ray_address, **common)
    else:
        needed = config.num_devices * config.threads_per_worker
        cores = os.cpu_count() or 1
        if not _gpus_here() and needed > cores:
            raise ValueError(
                _refusal(config, Devices("CPU", (("this host", cores // config.threads_per_worker),)))
            )
        ray.init(address="local", num_cpus=max(cores, needed), include_dashboard=False, **common)
    return True


def disconnect() -> None:
    """Leaves the cluster; one of our own ends with it."""
    ray.shutdown()


def find_devices(config: RunConfig, nodes: Sequence[dict[str, Any]] | None = None) -> Devices:
    """The devices that the cluster's nodes have. Raises `ValueError` when they are fewer than `num_devices`.

    The error names asked, available and what each node has; nothing waits for resources that do not exist.
    """
    alive = [n for n in (ray.nodes() if nodes is None else nodes) if n["Alive"]]
    gpus = tuple((_name(n), int(n["Resources"].get("GPU", 0))) for n in alive)
    if any(count for _, count in gpus):
        devices = Devices("GPU", gpus)
    else:
        cpus = tuple(
            (_name(n), int(n["Resources"].get("CPU", 0)) // config.threads_per_worker) for n in alive
        )
        devices = Devices("CPU", cpus)
    if len(alive) < config.num_nodes or devices.available < config.num_devices:
        raise ValueError(_refusal(config, devices))
    return devices


def _refusal(config: RunConfig, devices: Devices) -> str:
    nodes = ", ".join(f"{name}: {count}" for name, count in devices.per_node)
    unit = "GPUs" if devices.kind == "GPU" else f"workers of {config.threads_per_worker} core(s)"
    return (
        f"num_devices asks for {config.num_devices} on {config.num_nodes} node(s); available: {devices.available} {unit} "
        f"on {len(devices.per_node)} node(s) ({nodes}); lower num_devices, num_nodes or threads_per_worker, or set ray_address "
        "to a larger cluster"
    )


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


def _gpus_here() -> bool:
    import torch

    return torch.cuda.is_available()
