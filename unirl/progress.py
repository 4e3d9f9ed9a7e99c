# SPDX-License-Identifier: Apache-2.0
"""Where this process is in its work: long-running code says what it has reached.

A worker's heartbeat carries the last point and its age, so that one that stopped moving is told from one that is slow, and
the message can say where it stopped. A point costs a clock reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_last: tuple[str, float] = ("start", time.monotonic())
_listeners: list[Callable[[str], None]] = []


def reached(point: str) -> None:
    """Says that the process is at `point` now, for example `train.micro`."""
    global _last
    _last = (point, time.monotonic())
    for listener in _listeners:
        listener(point)


def last_point() -> tuple[str, float]:
    """(the last point, seconds since it was reached). May be asked for from any thread."""
    point, since = _last
    return point, time.monotonic() - since


def listen(listener: Callable[[str], None]) -> None:
    """Calls `listener` with every point from now on, in the thread that reaches it."""
    _listeners.append(listener)
