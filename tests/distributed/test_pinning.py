# SPDX-License-Identifier: Apache-2.0
"""`pin_workers`: disjoint cores, all threads of a process, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from unirl.config import RunConfig, parse
from unirl.distributed.cluster import Devices
from unirl.distributed.failures import ClusterRefusal
from unirl.distributed.pinning import check_pinning, cores_of

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to cores"
)


def config(**keys: Any) -> RunConfig:
    return parse(RunConfig, {"pin_workers": True, **keys})


def test_workers_of_a_node_get_disjoint_cores_of_those_that_may_be_used() -> None:
    usable = [1, 4, 5, 6, 9, 11]
    assert [cores_of(place, 2, usable) for place in range(3)] == [[1, 4], [5, 6], [9, 11]]
    assert cores_of(5, 1, usable) == [11]


def test_more_workers_than_cores_are_refused_with_the_keys_to_change() -> None:
    with pytest.raises(
        ClusterRefusal,
        match=r"2 workers of 2 core\(s\).*4 cores.*use 3 there \(0, 1, 2\).*threads_per_worker",
    ):
        cores_of(1, 2, [0, 1, 2])
    too_many = len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else 1
    with pytest.raises(ClusterRefusal, match="pin_workers is true"):
        check_pinning(config(num_devices=too_many), Devices("CPU", (("here", too_many),)))


def test_pinning_is_refused_where_workers_take_gpus() -> None:
    with pytest.raises(ClusterRefusal, match=r"pin_workers is true, but workers take GPUs"):
        check_pinning(config(), Devices("GPU", (("here", 1),)))
    check_pinning(config(pin_workers=False), Devices("GPU", (("here", 1),)))


PINNED = """
import os, threading
from pathlib import Path
from unirl.distributed.pinning import pin_process
release = threading.Event()
threading.Thread(target=release.wait, daemon=True).start()
before = sorted(os.sched_getaffinity(0))
cores = pin_process(len(before) - 1, 1)
threading.Thread(target=release.wait, daemon=True).start()
tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
assert len(tasks) >= 3
assert cores == before[-1:]
assert all(os.sched_getaffinity(task) == set(cores) for task in tasks)
"""


@needs_affinity
@pytest.mark.slow
def test_threads_that_run_already_and_those_that_follow_are_bound() -> None:
    subprocess.run([sys.executable, "-c", PINNED], check=True)
