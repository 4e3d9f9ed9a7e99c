# SPDX-License-Identifier: Apache-2.0
"""What can go wrong with workers and clusters, told so that a person knows which one, where, why and what next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ray.exceptions import RayActorError

LOG_LINES = 15
LINE_WIDTH = 200
TAIL_BYTES = 1 << 16
STARTED = re.compile(r"process (\d+) started$")
"""How a worker's log shows where a process begins, and its number."""
POINT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ([\w.]+)$")
"""How a worker's log shows that it reached a point."""
_FATAL = re.compile(r"Fatal Python error: (.*)")
_RAY_DETAIL = re.compile(
    r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes include|\n|$)", re.S
)


class Refusal(ValueError):  # noqa: N818 (an answer, and the user's to act on)
    """A run that started is refused what it needs, before it has done anything. The message says what to change."""


class ClusterRefusal(Refusal):
    """The cluster cannot give what the recipe asks for. The message names asked, available and what each node has."""


class WorkerFailure(RuntimeError):  # noqa: N818
    """A worker is lost and the run with it; its folder can be resumed. `worker` is its name, `phase` what it was doing."""

    def __init__(self, worker: str, phase: str, message: str) -> None:
        super().__init__(message)
        self.worker, self.phase = worker, phase


class WorkerDied(WorkerFailure):
    """A worker's process, or its node, is gone."""


class WorkerHung(WorkerFailure):
    """A worker is there and has not moved for `worker_timeout_s`."""


class ClusterLost(RuntimeError):  # noqa: N818
    """A process of Ray itself is gone. Nothing can be asked of the cluster any more."""


class WriteFailed(RuntimeError):  # noqa: N818
    """Something of a run could not be written and `checkpoint.on_error` is `stop`."""


def died(worker: str, phase: str, where: str, log: Path, error: RayActorError) -> WorkerDied:
    """The message for a worker that is gone: name, place, phase, exit cause, and the end of its log.

    Where its log shows a later point than was known here, that is the phase.
    """
    lines = last_lines(log)
    if point := last_point(lines):
        phase = f"{phase} (at {point})"
    return WorkerDied(
        worker,
        phase,
        f"{worker} ({where}) died while it was at {phase}: {exit_cause(error, lines)}\n{quoted_log(log, lines)}",
    )


def exit_cause(error: RayActorError, log: Sequence[str]) -> str:
    """Why a worker ended, from its own last words if it had any, else from Ray's."""
    for line in reversed(log):
        if found := _FATAL.search(line):
            return f"{found.group(1)} (a crash in native code; its Python stack is in the log)"
    text = str(error)
    found = _RAY_DETAIL.search(text)
    if found is None:
        return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    kind, detail = found.group(1), " ".join(found.group(2).split())
    if "connection error code 2" in detail:
        return (
            f"its connection closed and it left no last words ({kind}), as when it is killed (SIGKILL): by a person, a job "
            "scheduler, or the kernel for want of memory (see dmesg on that node)"
        )
    return f"{kind}: {detail}"


def last_lines(log: Path) -> list[str]:
    """A log from where its process last started, at most its last 64 KiB; empty when there is none here (another node's)."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if STARTED.search(line)]
    return lines[starts[-1] :] if starts else lines


def last_point(log: Sequence[str]) -> str | None:
    """The last point that a log shows as reached."""
    return next((found.group(1) for line in reversed(log) if (found := POINT_LINE.match(line))), None)


def quoted_log(log: Path, lines: Sequence[str] | None = None) -> str:
    """The end of a log, or what a crash wrote there, to be put under a message."""
    lines = last_lines(log) if lines is None else lines
    if not lines:
        return f"its log {log} is empty, or on another node"
    crash = next((i for i, line in enumerate(lines) if _FATAL.search(line)), None)
    shown = lines[-LOG_LINES:] if crash is None else lines[crash : crash + LOG_LINES]
    return f"the end of its log {log}:\n" + "\n".join(f"  | {line[:LINE_WIDTH]}" for line in shown)
