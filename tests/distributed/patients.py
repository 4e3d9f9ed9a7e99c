# SPDX-License-Identifier: Apache-2.0
"""Small actors that can be made to fail, for tests of who watches them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import ray

from unirl.distributed.member import Member
from unirl.distributed.process import WatchedProcess, as_actor
from unirl.distributed.supervisor import Supervisor
from unirl.progress import reached


class Patient(WatchedProcess):
    """Counts; sleeps, raises and dies when told to."""

    def __init__(self, who: str, log: str) -> None:
        self.begin(who, log)
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count

    def nap(self, seconds: float, step_s: float = 0.0) -> float:
        """Sleeps at one point, or in steps of which each is a point of its own."""
        reached("nap")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(step_s or seconds, seconds))
            if step_s:
                reached("nap.step")
        return seconds

    def fail(self, text: str) -> None:
        raise ArithmeticError(text)

    def die(self, after_s: float = 0.0, how: int = signal.SIGKILL) -> None:
        reached("die")
        print("about to end")
        time.sleep(after_s)
        os.kill(os.getpid(), how)
        time.sleep(30)  # the signal may take effect in another thread

    def pair(self, request: str) -> tuple[str, bytes]:
        return f"{request}:{self.count}", b"x" * 1000


def ward(folder: Path, num: int, **options: Any) -> tuple[Supervisor, list[Member]]:
    """`num` patients under one supervisor. Those that may be restarted come back with a count of 100."""
    supervisor = Supervisor(**options)
    members = []
    for index in range(num):
        log = folder / f"patient-{index}.log"

        def start(index: int = index, log: Path = log) -> Any:
            return as_actor(Patient).options(num_cpus=0).remote(f"patient-{index}", str(log))

        revive = (lambda ask: ask("add", 100)) if options.get("max_restarts") else None
        members.append(supervisor.add(Member(f"patient {index}", log, start, revive)))
    supervisor.get([m.add.remote(0) for m in members])
    return supervisor, members


def by_value() -> None:
    """Actor processes cannot import test modules, so their classes travel by value."""
    import sys

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
