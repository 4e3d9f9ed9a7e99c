# SPDX-License-Identifier: Apache-2.0
"""For tests of crashes: makes a process fail at a named point. Does nothing unless `UNIRL_FAILPOINT` is set.

The variable holds `who:point:count:what`, several separated by commas. `who` is `driver`, `train-0`, `rollout-1` or, colocated,
`worker-0`; `point` a name given to `unirl.progress.reached`; `count` says at which visit of this process (1 is the first). With
`after_s` for a point, `count` is a time instead: seconds after the process reached its first point. `what` is one of

- `kill`, `crash`, `stop`: this process gets SIGKILL, SIGSEGV, SIGSTOP
- `kill-driver`, `interrupt-driver`, `terminate-driver`: the driver, on the same host, gets SIGKILL, SIGINT, SIGTERM
- `raise`: a `RuntimeError` here
- `fill`, `clear`: from here on no file of this process grows beyond 1 KiB, as on a full disk; that is over

Each fires once a process, or, with `UNIRL_FAILPOINT_ONCE` naming a folder, once for all processes.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from unirl.progress import listen

VARIABLE = "UNIRL_FAILPOINT"
ONCE_VARIABLE = "UNIRL_FAILPOINT_ONCE"
DRIVER_VARIABLE = "UNIRL_FAILPOINT_DRIVER"

_SIGNALS = {
    "kill": signal.SIGKILL,
    "crash": signal.SIGSEGV,
    "stop": signal.SIGSTOP,
    "kill-driver": signal.SIGKILL,
    "interrupt-driver": signal.SIGINT,
    "terminate-driver": signal.SIGTERM,
}


def arm(who: str) -> None:
    """Sets this process up to fail where the variable says so for `who`."""
    if VARIABLE not in os.environ:
        return
    if who == "driver":
        os.environ[DRIVER_VARIABLE] = str(os.getpid())
    for spec in os.environ[VARIABLE].split(","):
        name, point, count, what = spec.split(":")
        if name == who:
            listen(
                _after(float(count), what, spec) if point == "after_s" else _at(point, int(count), what, spec)
            )


def environment() -> dict[str, str]:
    """The variables that a worker needs for this; empty outside such tests."""
    return {k: os.environ[k] for k in (VARIABLE, ONCE_VARIABLE, DRIVER_VARIABLE) if k in os.environ}


def _at(point: str, count: int, what: str, spec: str) -> Callable[[str], None]:
    visits: Counter[str] = Counter()

    def listener(at: str) -> None:
        visits[at] += 1
        if at == point and visits[at] == count:
            _fail(what, spec)

    return listener


def _after(seconds: float, what: str, spec: str) -> Callable[[str], None]:
    timers: list[threading.Timer] = []

    def listener(at: str) -> None:
        if not timers:
            timers.append(threading.Timer(seconds, _fail, (what, spec)))
            timers[0].daemon = True
            timers[0].start()

    return listener


def _fail(what: str, spec: str) -> None:
    if not _first_time(spec):
        return
    if what == "raise":
        raise RuntimeError(f"failpoint {spec}")
    if what in ("fill", "clear"):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024 if what == "fill" else hard, hard))
        return
    target = int(os.environ[DRIVER_VARIABLE]) if what.endswith("-driver") else os.getpid()
    os.kill(target, _SIGNALS[what])
    if what != "interrupt-driver" and what != "terminate-driver":
        time.sleep(60)  # nothing more happens here before the end


def _first_time(spec: str) -> bool:
    folder = os.environ.get(ONCE_VARIABLE)
    if folder is None:
        return True
    try:
        (Path(folder) / spec.replace(":", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
