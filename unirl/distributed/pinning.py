# SPDX-License-Identifier: Apache-2.0
"""Workers on cores of their own: `pin_workers`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from unirl.config import RunConfig
from unirl.cores import usable_cores
from unirl.distributed.cluster import Devices
from unirl.distributed.failures import ClusterRefusal

_REMEDY = "set pin_workers: false"


def check_pinning(config: RunConfig, devices: Devices) -> None:
    """Raises `ClusterRefusal` where `pin_workers` is known to be impossible before a worker starts."""
    if not config.pin_workers:
        return
    if devices.kind == "GPU":
        raise ClusterRefusal(
            f"pin_workers is true, but workers take GPUs here and need cores for more than compute; {_REMEDY}"
        )
    if not hasattr(os, "sched_setaffinity"):
        raise ClusterRefusal(
            f"pin_workers is true, but this system cannot bind a process to cores; {_REMEDY}"
        )
    if config.ray_address is None:
        cores_of(config.num_devices - 1, config.threads_per_worker, usable_cores())


def cores_of(place: int, threads: int, usable: Sequence[int]) -> list[int]:
    """The cores of the worker that is number `place` on its node, `threads` of the `usable` ones; disjoint between workers.

    Raises `ClusterRefusal` when there are not enough.
    """
    cores = list(usable[place * threads : (place + 1) * threads])
    if len(cores) < threads:
        raise ClusterRefusal(
            f"pin_workers is true: {place + 1} workers of {threads} core(s) on one node need {(place + 1) * threads} cores, and a "
            f"process may use {len(usable)} there ({', '.join(map(str, usable))}); lower num_devices or threads_per_worker, raise "
            f"num_nodes, or {_REMEDY}"
        )
    return cores


def pin_process(place: int, threads: int) -> list[int]:
    """Binds all threads of this process, and so those that it will start, to the cores of `cores_of`; returns them."""
    cores = cores_of(place, threads, usable_cores())
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    return cores
