# SPDX-License-Identifier: Apache-2.0
"""What each rank did when, measured or simulated: makespan over ideal, idle time, and a trace file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One call on one rank, from `start` to `end`: of the engine, or of the scorers (`phase` "score").

    `label` is the group, or the first and last row of several; `canvas` the rows' size in words; `stolen` says that the rows
    were another rank's.
    """

    rank: int
    start: float
    end: float
    phase: str
    label: str
    num_rows: int
    canvas: str
    stolen: bool = False


@dataclass(frozen=True)
class CallTimeline:
    """The calls of one rollout on `num_ranks` ranks. Times share one clock; its zero does not matter."""

    calls: tuple[Call, ...]
    num_ranks: int
    num_stolen_units: int = 0

    @cached_property
    def begin(self) -> float:
        return min((call.start for call in self.calls), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first rank's start to the last one's end."""
        return max((call.end for call in self.calls), default=0.0) - self.begin

    @cached_property
    def busy(self) -> list[float]:
        """Time in which each rank generates or scores; where it does both at once, that time counts once."""
        busy = [0.0] * self.num_ranks
        reached = [self.begin] * self.num_ranks
        for call in sorted(self.calls, key=lambda call: call.start):
            busy[call.rank] += max(0.0, call.end - max(call.start, reached[call.rank]))
            reached[call.rank] = max(reached[call.rank], call.end)
        return busy

    @property
    def ideal(self) -> float:
        """The work done divided by the ranks: no order and no placement of the same calls ends earlier."""
        return sum(self.busy) / self.num_ranks

    @property
    def tail_ratio(self) -> float:
        """Makespan over ideal: 1 is perfect."""
        return self.makespan / self.ideal if self.ideal > 0 else 1.0

    @property
    def idle(self) -> list[float]:
        """Time each rank waits, before its first call, between calls and for the last rank to end."""
        return [self.makespan - busy for busy in self.busy]


def chrome_trace(timelines: Sequence[tuple[str, CallTimeline]], *, scale_us: float = 1e6) -> dict[str, Any]:
    """Named timelines for chrome://tracing or Perfetto: a process each, a track a rank, and one for scoring beside it.

    All start at 0. `scale_us` is microseconds a unit of time.
    """
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(timelines):
        events.append(_meta("process_name", process, 0, name))
        for rank in range(timeline.num_ranks):
            events.append(_meta("thread_name", process, 2 * rank, f"rank {rank}"))
        for rank in sorted({call.rank for call in timeline.calls if call.phase == "score"}):
            events.append(_meta("thread_name", process, 2 * rank + 1, f"rank {rank}: scoring"))
        for call in timeline.calls:
            events.append(
                {
                    "ph": "X",
                    "name": call.label,
                    "cat": call.phase + (",stolen" if call.stolen else ""),
                    "pid": process,
                    "tid": 2 * call.rank + (call.phase == "score"),
                    "ts": (call.start - timeline.begin) * scale_us,
                    "dur": (call.end - call.start) * scale_us,
                    "args": {"rows": call.num_rows, "canvas": call.canvas, "stolen": call.stolen},
                }
            )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def read_trace(trace: Mapping[str, Any], *, scale_us: float = 1e6) -> list[tuple[str, CallTimeline]]:
    """The inverse of `chrome_trace`, but for the number of stolen units; raises `ValueError` for another program's trace."""
    try:
        names: dict[int, str] = {}
        ranks: dict[int, int] = {}
        calls: dict[int, list[Call]] = {}
        for event in trace["traceEvents"]:
            process = event["pid"]
            if event["ph"] == "M":
                if event["name"] == "process_name":
                    names[process] = event["args"]["name"]
                else:
                    ranks[process] = max(ranks.get(process, 0), event["tid"] // 2 + 1)
                continue
            start = event["ts"] / scale_us
            args = event["args"]
            calls.setdefault(process, []).append(
                Call(
                    rank=event["tid"] // 2,
                    start=start,
                    end=start + event["dur"] / scale_us,
                    phase=event["cat"].split(",")[0],
                    label=event["name"],
                    num_rows=args["rows"],
                    canvas=args["canvas"],
                    stolen=args["stolen"],
                )
            )
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no timeline of a rollout: {error!r} in its events") from error
    return [(names[p], CallTimeline(tuple(calls.get(p, ())), ranks[p])) for p in sorted(names)]


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
