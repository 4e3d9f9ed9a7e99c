# SPDX-License-Identifier: Apache-2.0
"""What every worker process has beside its work: a log of its own, a heartbeat, and last words when it crashes."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from unirl.distributed import failpoints
from unirl.progress import last_point, listen

GROUPS = {"lifeline": 1, "pulse": 1, "save": 1}
"""Ray's concurrency groups: calls that are answered while the worker works, each in a thread of its own."""


class WatchedProcess:
    """A base for actors that a `Supervisor` watches. Make the actor class of it by `as_actor`."""

    def begin(self, who: str, log: str) -> None:
        """Sends this process's output, native code's included, to the file `log`; a crash leaves its Python stack there."""
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(file, stream)
        os.close(file)
        # Ray gave Python streams of its own; from here on they are the process's.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2, all_threads=False)
        _log(f"process {os.getpid()} started")
        listen(_log)
        failpoints.arm(who)

    def where(self) -> tuple[str, int]:
        """(host name, process id)."""
        return socket.gethostname(), os.getpid()

    @ray.method(concurrency_group="lifeline")
    def hold(self) -> None:
        """Never returns: the call ends when the process does, and so tells of its end at once."""
        threading.Event().wait()

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> tuple[str, float]:
        """(the last point that the process reached, seconds since)."""
        return last_point()


def _log(point: str) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to stop working
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {point}")


def as_actor(cls: type) -> Any:
    """The actor class of a `WatchedProcess`."""
    return ray.remote(concurrency_groups=GROUPS)(cls)
