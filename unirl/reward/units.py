# SPDX-License-Identifier: Apache-2.0
"""Where a rank's micro loop takes its next rows from: a fixed list, or units pulled under a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from unirl.protocols import UnitSource
from unirl.schedule.coordinator import Assignment
from unirl.schedule.plan import RolloutPlan


class Batch(NamedTuple):
    """Rows for one call of the engine, by their place in the request's frontier."""

    rows: Sequence[int]
    label: str
    stolen: bool = False
    num_units: int = 1
    lease: int = -1


class BatchSource(Protocol):
    """Gives one batch after another. A rank is never pushed to, and waits for nobody."""

    def first(self) -> Batch | None:
        """The first batch; None when there is nothing to do."""

    def next(self, finished: Batch, seconds: float) -> tuple[bool, Batch | None]:
        """Reports a batch as done in `seconds`; (whether its rows are wanted, the next batch)."""


class FixedBatches:
    """A list of batches, in order."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._left = iter(list(batches))

    def first(self) -> Batch | None:
        return next(self._left, None)

    def next(self, finished: Batch, seconds: float) -> tuple[bool, Batch | None]:
        return True, next(self._left, None)


class PulledUnits:
    """Units of a plan, pulled by `rank` from `source`.

    Args:
        place: of each row id in the request's frontier.
        source: the coordinator of all ranks, or, for a schedule without one, the plan's own.
    """

    def __init__(self, plan: RolloutPlan, rank: int, place: Mapping[str, int], source: UnitSource) -> None:
        self._table = plan.unit_table()
        self._rank = rank
        self._place = place
        self._source = source

    def first(self) -> Batch | None:
        return self._batch(self._source.pull(self._rank))

    def next(self, finished: Batch, seconds: float) -> tuple[bool, Batch | None]:
        accepted, assignment = self._source.done_and_pull(self._rank, finished.lease, seconds)
        return accepted, self._batch(assignment)

    def _batch(self, assignment: Assignment | None) -> Batch | None:
        if assignment is None:
            return None
        unit_ids = assignment.unit_ids
        groups = [self._table.groups[self._table.units[i].group].group_id for i in unit_ids]
        return Batch(
            rows=[self._place[row_id] for row_id in self._table.rows_of(unit_ids)],
            label=groups[0] if groups[0] == groups[-1] else f"{groups[0]} .. {groups[-1]}",
            stolen=assignment.stolen,
            num_units=len(unit_ids),
            lease=assignment.lease,
        )
