# SPDX-License-Identifier: Apache-2.0
"""A discrete-event simulator of a rollout: ranks pull from the real coordinator, only time is made up."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unirl.schedule.coordinator import AdaptivePacking, Assignment, Coordinator, FullPacking
from unirl.schedule.cost import RankCorrection
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.policies import POLICIES, OwnerPolicy, RingPolicy, SchedulePolicy, StealPolicy
from unirl.schedule.timeline import Call, CallTimeline
from unirl.schedule.units import Cost, Group, UnitTable, Workload, build_unit_table


class Span(NamedTuple):
    """One call: from `start` to `end`, in the cost model's unit."""

    rank: int
    start: float
    end: float
    unit_ids: tuple[int, ...]
    stolen: bool


@dataclass(frozen=True)
class Timeline:
    """What each rank did when. `ideal` is the work divided by the ranks: no schedule can be shorter."""

    spans: tuple[Span, ...]
    num_ranks: int
    ideal: float
    num_stolen_units: int

    @property
    def makespan(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def tail_ratio(self) -> float:
        """Makespan over ideal: 1 is perfect."""
        return self.makespan / self.ideal if self.ideal else 1.0

    @property
    def idle(self) -> list[float]:
        """Time each rank waits for the last one, plus what it waited before."""
        busy = [0.0] * self.num_ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return [self.makespan - time for time in busy]

    @property
    def idle_share(self) -> float:
        """Idle time over all rank time."""
        total = self.makespan * self.num_ranks
        return sum(self.idle) / total if total else 0.0

    def calls(self, table: UnitTable) -> CallTimeline:
        """The same with what a picture or a trace shows of each call."""
        calls = []
        for span in self.spans:
            units = [table.units[unit_id] for unit_id in span.unit_ids]
            group = table.groups[units[0].group]
            num_rows = sum(unit.num_rows for unit in units)
            canvas = f"{group.workload.tokens} tokens"
            calls.append(
                Call(
                    span.rank, span.start, span.end, "generate", group.group_id, num_rows, canvas, span.stolen
                )
            )
        return CallTimeline(tuple(calls), self.num_ranks, self.num_stolen_units)


def simulate(
    table: UnitTable,
    num_ranks: int,
    policy: SchedulePolicy,
    *,
    packing: AdaptivePacking | FullPacking | None = None,
    correction: RankCorrection | None = None,
    duration: Callable[[Assignment], float] | None = None,
) -> Timeline:
    """Runs a rollout. `duration` is how long an assignment really takes; by default, what was predicted."""
    coordinator = Coordinator(table, num_ranks, policy, packing=packing, correction=correction)
    spans: list[Span] = []
    # (time a rank is free, the rank, its last call): on a tie the lowest rank asks first.
    events: list[tuple[float, int, tuple[int, float] | None]] = [
        (0.0, rank, None) for rank in range(num_ranks)
    ]
    while events:
        now, rank, last = heapq.heappop(events)
        if last is not None:
            coordinator.done(*last)
        assignment = coordinator.pull(rank)
        if assignment is None:
            continue
        length = assignment.cost if duration is None else duration(assignment)
        spans.append(Span(rank, now, now + length, assignment.unit_ids, assignment.stolen))
        heapq.heappush(events, (now + length, rank, (assignment.lease, length)))
    assert coordinator.is_finished
    return Timeline(tuple(spans), num_ranks, table.total_cost / num_ranks, coordinator.num_stolen_units)


def simulate_plan(plan: RolloutPlan, cost: Cost) -> CallTimeline:
    """A rollout's plan on ranks that take exactly what `cost`, which need not be the plan's own, says of a call."""
    table = plan.unit_table()
    affine = [cost.affine(group.workload) for group in plan.groups]

    def duration(assignment: Assignment) -> float:
        units = [table.units[unit_id] for unit_id in assignment.unit_ids]
        rows = sum(unit.num_rows * affine[unit.group][0] for unit in units)
        return rows + max(affine[unit.group][1] for unit in units)

    policy, packing = POLICIES[plan.schedule](), plan.coordinator().packing
    return simulate(table, plan.num_ranks, policy, packing=packing, duration=duration).calls(table)


def compare_schedules(
    groups: Sequence[Group], num_ranks: int, cost: Cost
) -> list[tuple[str, UnitTable, Timeline]]:
    """(name, units, timeline) of `owner`, `ring`, and `steal` with whole groups, halves, quarters and adaptive units."""
    rows = max(len(group.row_ids) for group in groups)
    cases: list[tuple[str, SchedulePolicy, int, bool]] = [
        ("owner", OwnerPolicy(), rows, False),
        ("ring, a row a unit", RingPolicy(), 1, False),
        ("steal, whole groups", StealPolicy(), rows, False),
        ("steal, halves", StealPolicy(), max(1, rows // 2), False),
        ("steal, quarters", StealPolicy(), max(1, rows // 4), False),
        ("steal, adaptive units", StealPolicy(), rows, True),
    ]
    outcomes = []
    for name, policy, max_rows, adaptive in cases:
        table = build_unit_table(groups, cost, max_rows=max_rows, min_rows=1 if adaptive else None)
        packing = AdaptivePacking(max_rows) if adaptive else None
        outcomes.append((name, table, simulate(table, num_ranks, policy, packing=packing)))
    return outcomes


def parse_mix(text: str, *, rows_a_group: int, pixel_stride: int = 16) -> tuple[list[Group], int]:
    """(groups, number of ranks) of a placement in words: each rank's canvases, ranks separated by `;`.

    A canvas is a side or `HxW`, in pixels; `3*` before a rank's list repeats the rank. `EXAMPLE_MIX` is 8
    ranks of 4 groups, the two largest canvases on one rank.
    """
    ranks: list[list[int]] = []
    for entry in text.split(";"):
        repeat, star, canvases = entry.rpartition("*")
        try:
            tokens = [_tokens(canvas, pixel_stride) for canvas in canvases.split(",")]
            ranks += [tokens] * (int(repeat) if star else 1)
        except ValueError as error:
            raise ValueError(
                f"cannot read {entry.strip()!r} of the mix ({error}); write the canvases of a rank like "
                "'1024,512,512x768', ranks separated by ';', '3*' before a rank to repeat it"
            ) from error
    groups = [
        Group(
            f"g{rank}.{index}",
            tuple(f"g{rank}.{index}/{row}" for row in range(rows_a_group)),
            Workload(count),
            rank,
        )
        for rank, counts in enumerate(ranks)
        for index, count in enumerate(counts)
    ]
    return groups, len(ranks)


EXAMPLE_MIX = "1024,1024,512,512; 2*1024,512,512,512; 5*768,512,512,512"


def _tokens(canvas: str, pixel_stride: int) -> int:
    sides = [int(side) for side in canvas.strip().split("x")]
    if len(sides) > 2 or any(side <= 0 or side % pixel_stride for side in sides):
        raise ValueError(f"{canvas.strip()!r} is not a side or HxW in multiples of {pixel_stride} pixels")
    return sides[0] // pixel_stride * (sides[-1] // pixel_stride)
