# SPDX-License-Identifier: Apache-2.0
"""A worker as the driver sees it: its actor, where it runs, what it was last seen doing, and how to start it again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from unirl.distributed.cluster import ask_at_the_end

END_TIMEOUT_S = 3.0
"""How long a worker is given to be gone after it was told to end; then its process is killed by number."""


@dataclasses.dataclass(eq=False)
class Call:
    """A call on a worker, and what it takes to make it again on the worker's successor."""

    member: Member
    method: str
    args: tuple[Any, ...]
    num_returns: int
    refs: tuple[Any, ...] = ()
    began: float = 0.0

    def submit(self) -> None:
        self.began = time.monotonic()
        method = getattr(self.member.actor, self.method)
        refs = method.options(num_returns=self.num_returns).remote(*self.args)
        self.refs = tuple(refs) if self.num_returns > 1 else (refs,)


@dataclasses.dataclass(frozen=True)
class Method:
    """`member.name`, called as a method of an actor handle is."""

    member: Member
    name: str
    num_returns: int = 1

    def options(self, *, num_returns: int) -> Method:
        return dataclasses.replace(self, num_returns=num_returns)

    def remote(self, *args: Any) -> Any:
        return self.member.submit(self.member, self.name, args, self.num_returns)


class Member:
    """One worker.

    Args:
        name: as messages call it, `rollout worker 1`. log: where its output goes.
        start: makes the actor; called again when it is restarted.
        revive: given a function that asks the new actor and waits, brings it to where the old one was; None when the worker
            cannot be restarted.
    """

    submit: Callable[[Member, str, tuple[Any, ...], int], Any]
    """Set by the supervisor that watches the worker."""
    spare: Callable[[Sequence[str]], bool] | None = None
    """Asked when the worker is gone for good, with the methods it was asked for: whether the run goes on without it."""

    def __init__(
        self,
        name: str,
        log: Path,
        start: Callable[[], Any],
        revive: Callable[[Callable[..., Any]], None] | None = None,
    ) -> None:
        self.name, self.log, self.revive = name, log, revive
        self._start = start
        self.begin()

    def __getattr__(self, method: str) -> Method:
        return Method(self, method)

    def begin(self) -> None:
        """Starts the actor, and on it the call that ends when it does."""
        self.actor = self._start()
        self.lifeline = self.actor.hold.remote()
        self.where = "not started yet"
        self.point = "start"
        self._process: int | None = None  # a pidfd, where the worker is on this host
        self._where_ref: Any = self.actor.where.remote()
        self._pulse: Any = None
        self._asked = 0.0
        self._age_s = 0.0

    @property
    def started(self) -> bool:
        """Whether its process has answered once."""
        return self._where_ref is None

    def feel_pulse(self, clock: float, *, every_s: float) -> tuple[float, bool]:
        """(seconds since the worker was last known to move, whether it answers). Asks it again when it is time to."""
        if self._asked == 0.0:
            self._asked = clock
        if self._where_ref is not None:
            if not self.locate():
                return clock - self._asked, False
            self._asked = clock
        elif self._pulse is None:
            if clock - self._asked >= every_s:
                self._pulse, self._asked = self.actor.pulse.remote(), clock
        elif _ready(self._pulse):
            self.point, self._age_s = ray.get(self._pulse)
            self._pulse = None
        else:
            return clock - self._asked + self._age_s, False
        return self._age_s + (clock - self._asked if self._age_s else 0.0), True

    def locate(self) -> bool:
        """Whether it is known where the worker runs. Raises `RayActorError` when it died before it could say."""
        if self._where_ref is not None and _ready(self._where_ref):
            host, pid = ray.get(self._where_ref)
            self._where_ref = None
            self.where = f"process {pid} on {host}"
            if host == socket.gethostname():
                with contextlib.suppress(ProcessLookupError):
                    self._process = os.pidfd_open(pid)
        return self._where_ref is None

    def end(self) -> None:
        """Ends the actor and sees to it that its process goes, even one that is stopped."""
        ask_at_the_end(lambda: ray.kill(self.actor))
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            if not select.select([process], [], [], END_TIMEOUT_S)[0]:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(process)


def _ready(ref: Any) -> bool:
    return bool(ray.wait([ref], timeout=0)[0])
