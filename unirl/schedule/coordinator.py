# SPDX-License-Identifier: Apache-2.0
"""Hands units out to ranks that ask, each exactly once. Pure: an actor, a simulator or a test drives it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from unirl.schedule.cost import RankCorrection
from unirl.schedule.deques import CostDeques
from unirl.schedule.policies import SchedulePolicy
from unirl.schedule.units import Unit, UnitTable


class Assignment(NamedTuple):
    """Units for one rank to run in one call; `lease`, unique in the rollout, goes to `done`."""

    lease: int
    rank: int
    unit_ids: tuple[int, ...]
    cost: float
    stolen: bool


@dataclass(frozen=True)
class FullPacking:
    """A call runs as many units as `max_rows` rows hold: right where nobody can take work away.

    Units of one group, and with `across_groups` also of others with the same canvas, steps and branches, of each equally many
    rows: what an engine runs as one batch.
    """

    max_rows: int
    across_groups: bool = True

    def target_cost(self, unstarted_cost: float, num_ranks: int, per_call: float) -> float:
        return math.inf


@dataclass(frozen=True)
class AdaptivePacking:
    """How many units one call runs: many at first, single ones at the end.

    With R the cost that is still unstarted and m the number of ranks, the rows of a call may cost

        max(R / (guidance * m), sqrt(8 * h * R / m)).

    The first term makes calls shrink with the work that is left, so that the last ones are as small as units
    are (guided self-scheduling, Polychronopoulos and Kuck, 1987). The second bounds what the fixed cost h of a
    call adds: cutting a rank's share R / m into pieces of size x costs (R / m) * h / x in calls and some x / 8 of
    waiting at the end (it is less than half a piece because calls go on shrinking; the eighth did best, or nearly, in a
    simulation over a 512 / 768 / 1024 mix with h from 1/16 of the smallest row to 8 of them), which is least
    at that x. Never more than `max_rows` rows, and never less than one unit; `across_groups` as in `FullPacking`.
    """

    max_rows: int
    guidance: float = 1.25
    across_groups: bool = False

    def target_cost(self, unstarted_cost: float, num_ranks: int, per_call: float) -> float:
        share = max(unstarted_cost, 0.0) / num_ranks  # a sum of floats may end just below 0
        return max(share / self.guidance, math.sqrt(8.0 * per_call * share))


class Coordinator:
    """The state of one rollout's schedule.

    A rank pulls an assignment, runs it and reports it done; then it pulls again until `pull` gives None.
    Nobody is pushed to and nobody waits. A rank that died is reported with `lost`: what it had not delivered
    is handed to whichever rank asks next, under every policy, and a report that still arrives for it is
    refused, so the rows of a unit are accepted exactly once. After `lost`, ranks that had already been given
    None have to ask again.
    """

    def __init__(
        self,
        table: UnitTable,
        num_ranks: int,
        policy: SchedulePolicy,
        *,
        packing: AdaptivePacking | FullPacking | None = None,
        correction: RankCorrection | None = None,
    ) -> None:
        strangers = sorted({group.owner for group in table.groups} - set(range(num_ranks)))
        if strangers:
            raise ValueError(f"groups are owned by ranks {strangers}, and there are {num_ranks} ranks")
        self.table = table
        self.policy = policy
        self.packing = packing
        self.correction = correction
        self._num_live = num_ranks
        self._lost_ranks: set[int] = set()
        # The queue after the last rank's holds the units of ranks that died.
        self._orphans = num_ranks
        self._deques = CostDeques([*policy.place(table.units, num_ranks), []])
        self._leases: dict[int, Assignment] = {}
        self._next_lease = 0
        self._finished: dict[int, list[int]] = {}
        self._num_done = 0
        self._num_stolen = 0
        if correction is not None:
            for rank in range(num_ranks):
                self._deques.set_factor(rank, correction.factor(rank))

    # ---- what a rank calls

    def start(self, rank: int) -> Assignment | None:
        """The first `pull` of a rank that holds nothing: whatever it had pulled before is lost, and handed out again."""
        if rank in self._finished or any(lease.rank == rank for lease in self._leases.values()):
            self.lost(rank)
        return self.pull(rank)

    def pull(self, rank: int) -> Assignment | None:
        """The next units for `rank`, now its own to run; None when nothing is unstarted that it may run."""
        if rank in self._lost_ranks:
            self._lost_ranks.remove(rank)
            self._num_live += 1
        deques = self._deques
        pick = self.policy.pick(deques, rank)
        if pick is not None:
            source, from_back = pick
        elif deques.queue(self._orphans):
            source, from_back = self._orphans, False
        else:
            return None
        unit = deques.pop_back(source) if from_back else deques.pop_front(source)
        unit_ids = (unit.unit_id,) if self.packing is None else self._pack(unit, source, rank, from_back)
        stolen = source != rank
        if stolen:
            self._num_stolen += len(unit_ids)
        lease = self._next_lease
        self._next_lease = lease + 1
        assignment = Assignment(lease, rank, unit_ids, self.table.cost_of(unit_ids), stolen)
        self._leases[lease] = assignment
        return assignment

    def done(self, lease: int, seconds: float | None = None) -> bool:
        """Reports an assignment as finished in `seconds`. False when it was revoked: drop those results."""
        assignment = self._leases.pop(lease, None)
        if assignment is None:
            return False
        self._finished.setdefault(assignment.rank, []).extend(assignment.unit_ids)
        self._num_done += len(assignment.unit_ids)
        if self.correction is not None and seconds is not None:
            rank = assignment.rank
            self.correction.update(rank, predicted=assignment.cost, measured=seconds)
            self._deques.set_factor(rank, self.correction.factor(rank))
        return True

    def done_and_pull(self, rank: int, lease: int, seconds: float | None) -> tuple[bool, Assignment | None]:
        """`done` and then `pull`: one round trip a unit for a rank that asks over a network."""
        return self.done(lease, seconds), self.pull(rank)

    # ---- what the driver calls

    def lost(self, rank: int, *, delivered: Collection[int] = ()) -> tuple[int, ...]:
        """Says that `rank` died, and returns the ids of the units that are thereby unstarted again.

        Those are what it had queued, what it was running, and what it had reported done but not `delivered`: the rows
        of those units died with it.
        """
        if rank in self._lost_ranks:
            return ()
        self._lost_ranks.add(rank)
        self._num_live -= 1
        undelivered = [unit_id for unit_id in self._finished.pop(rank, []) if unit_id not in delivered]
        self._num_done -= len(undelivered)
        revoked = [lease for lease, assignment in self._leases.items() if assignment.rank == rank]
        running = [unit_id for lease in revoked for unit_id in self._leases.pop(lease).unit_ids]
        units = [self.table.units[unit_id] for unit_id in (*undelivered, *running)]
        units += self._deques.clear(rank)
        self._deques.put(self._orphans, units)
        return tuple(sorted(unit.unit_id for unit in units))

    @property
    def is_finished(self) -> bool:
        """Whether every unit is done."""
        return self._num_done == len(self.table.units)

    @property
    def num_unstarted(self) -> int:
        return sum(len(self._deques.queue(rank)) for rank in range(len(self._deques)))

    @property
    def num_stolen_units(self) -> int:
        """Units handed to a rank whose queue they were not in, those of lost ranks included."""
        return self._num_stolen

    # ---- packing

    def _pack(self, unit: Unit, source: int, rank: int, from_back: bool) -> tuple[int, ...]:
        """Adds neighbours from the same end of the same queue, up to the target."""
        assert self.packing is not None
        deques, table = self._deques, self.table
        per_row, per_call = table.per_row[unit.group], table.per_call[unit.group]
        target = self.packing.target_cost(deques.total_queued + unit.cost, max(self._num_live, 1), per_call)
        if self.correction is not None:
            target /= self.correction.factor(rank)
        max_rows = self.packing.max_rows
        if per_row > 0 and target < math.inf:
            max_rows = min(max_rows, int(target / per_row + 1e-9))
        queue = deques.queue(source)
        step = -1 if from_back else 1

        def chunk(last: Unit, wanted: int, taken: int) -> list[Unit]:
            """Units that follow `last` in its group, from place `taken` of the queue on, of up to `wanted` rows."""
            units: list[Unit] = []
            while taken < len(queue):
                other = queue[-1 - taken if from_back else taken]
                follows = other.group == last.group and other.unit_id == last.unit_id + step
                if not follows or other.num_rows > wanted:
                    break
                units.append(other)
                last, wanted, taken = other, wanted - other.num_rows, taken + 1
            return units

        units = [unit, *chunk(unit, max_rows - unit.num_rows, 0)]
        a_group = sum(other.num_rows for other in units)
        num_rows, shape = a_group, table.shape(unit.group)
        while self.packing.across_groups and len(units) - 1 < len(queue) and num_rows + a_group <= max_rows:
            place = len(units) - 1
            first = queue[-1 - place if from_back else place]
            if first.group == units[-1].group or table.shape(first.group) != shape:
                break
            following = [first, *chunk(first, a_group - first.num_rows, place + 1)]
            if sum(other.num_rows for other in following) != a_group:
                break
            units += following
            num_rows += a_group
        pop = deques.pop_back if from_back else deques.pop_front
        for _ in units[1:]:
            pop(source)
        unit_ids = tuple(other.unit_id for other in units)
        return unit_ids if step > 0 else unit_ids[::-1]
