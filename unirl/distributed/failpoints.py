# SPDX-License-Identifier: Apache-2.0
"""For tests of crashes: makes a process fail at a named point. Does nothing unless `UNIRL_FAILPOINT` is set.

The variable holds `who:point:count:what`, several separated by commas. `who` is `driver`, `train-0`, `rollout-1` or, colocated,
`worker-0`; `point` a name given to `unirl.progress.reached`; `count` says at which visit of this process (1 is the first);
`what` is one of

- `kill`, `crash`, `stop`: this process gets SIGKILL, SIGSEGV, SIGSTOP
- `kill-driver`, `interrupt-driver`, `terminate-driver`: the driver, on the same host, gets SIGKILL, SIGINT, SIGTERM
- `raise`: a `RuntimeError` here

Each fires once a process, or, with `UNIRL_FAILPOINT_ONCE` naming a folder, once for all processes.
"""

from __future__ import annotations

import os
import signal
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
            listen(_failure(point, int(count), what, spec))


def environment() -> dict[str, str]:
    """The variables that a worker needs for this; empty outside such tests."""
    return {k: os.environ[k] for k in (VARIABLE, ONCE_VARIABLE, DRIVER_VARIABLE) if k in os.environ}


def _failure(point: str, count: int, what: str, spec: str) -> Callable[[str], None]:
    visits: Counter[str] = Counter()

    def fail(at: str) -> None:
        visits[at] += 1
        if at != point or visits[at] != count or not _first_time(spec):
            return
        if what == "raise":
            raise RuntimeError(f"failpoint {spec}")
        target = int(os.environ[DRIVER_VARIABLE]) if what.endswith("-driver") else os.getpid()
        os.kill(target, _SIGNALS[what])
        if what == "kill-driver" and target != os.getpid():
            time.sleep(60)  # nothing more happens here before the driver's end reaches this process

    return fail


def _first_time(spec: str) -> bool:
    folder = os.environ.get(ONCE_VARIABLE)
    if folder is None:
        return True
    try:
        (Path(folder) / spec.replace(":", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
