# SPDX-License-Identifier: Apache-2.0
"""Which rank runs which unit: `owner`, `ring` and `steal`. A policy holds no state of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from unirl.schedule.deques import CostDeques
from unirl.schedule.units import Unit


class Pick(NamedTuple):
    """Take from the deque of `rank`, at its back (the cheapest unit) or at its front (the dearest)."""

    rank: int
    from_back: bool


class SchedulePolicy(Protocol):
    """Places units on ranks at the start, and says where a rank takes its next one from."""

    name: str

    def place(self, units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
        """The units that each rank starts with."""

    def pick(self, deques: CostDeques, rank: int) -> Pick | None:
        """Where `rank` takes its next unit from; None when there is nothing for it."""


class OwnerPolicy:
    """Each rank runs its own units, dearest first."""

    name = "owner"

    def place(self, units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
        placement: list[list[Unit]] = [[] for _ in range(num_ranks)]
        for unit in units:
            placement[unit.owner].append(unit)
        return placement

    def pick(self, deques: CostDeques, rank: int) -> Pick | None:
        return Pick(rank, from_back=False) if deques.queue(rank) else None


class RingPolicy(OwnerPolicy):
    """The units of each group rotate over the ranks, the next group going on where the last one stopped.

    Exact when every group has a multiple of `num_ranks` units: each rank then runs equally many of every
    group. Otherwise the remainder rotates by group, and unit counts differ by at most one. Needs no
    coordinator.
    """

    name = "ring"

    def place(self, units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
        return [list(units[rank::num_ranks]) for rank in range(num_ranks)]


class StealPolicy(OwnerPolicy):
    """Each rank runs its own units, dearest first; then it takes the cheapest of the most loaded rank's.

    A greedy schedule: no rank is idle while a unit is unstarted. Its makespan is therefore at most (2 - 1/m)
    times the optimum on m ranks (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """

    name = "steal"

    def pick(self, deques: CostDeques, rank: int) -> Pick | None:
        if deques.queue(rank):
            return Pick(rank, from_back=False)
        victim = deques.most_loaded()
        return None if victim is None else Pick(victim, from_back=True)


POLICIES: dict[str, type[OwnerPolicy]] = {
    policy.name: policy for policy in (OwnerPolicy, RingPolicy, StealPolicy)
}


def policy_for(schedule: str, *, engine: str, noise_keyed_by_row: bool) -> SchedulePolicy:
    """The policy of `reward_stack.schedule`, if the engine can run it.

    Stealing depends on timing. Where an engine's noise depends on what the rank drew before, a stolen row
    would differ from run to run: refused.
    """
    if schedule not in POLICIES:
        raise ValueError(f"reward_stack.schedule is {schedule!r}; allowed are {', '.join(POLICIES)}")
    if schedule == StealPolicy.name and not noise_keyed_by_row:
        raise ValueError(
            f"reward_stack.schedule is 'steal', but the noise of engine {engine!r} is not keyed by row, so a stolen row "
            "would come out differently; use 'owner' or 'ring', or an engine with keyed noise"
        )
    return POLICIES[schedule]()
