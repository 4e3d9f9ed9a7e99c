# SPDX-License-Identifier: Apache-2.0
"""The schedule's state where all ranks reach it. The actor forwards to the pure coordinator of each rollout in flight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from unirl.schedule.coordinator import Assignment, Coordinator
from unirl.schedule.cost import RankCorrection
from unirl.schedule.plan import RolloutPlan

if TYPE_CHECKING:  # whoever pulls through this imports no tensor library
    from unirl.protocols import UnitSource


class OpenRollouts:
    """The coordinators of the rollouts in flight, by number; runs as an actor.

    How slow each rank is, measured against the predicted cost, is remembered from one rollout to the next. Calls for a
    rollout that is closed, from a rank that was given up on but lives, get nothing to do.
    """

    def __init__(self) -> None:
        self._open: dict[int, Coordinator] = {}
        self._corrections: dict[int, RankCorrection] = {}

    def open(self, number: int, plan: RolloutPlan) -> str:
        """Starts rollout `number`; returns the digest of its units."""
        correction = self._corrections.setdefault(plan.num_ranks, RankCorrection(plan.num_ranks))
        coordinator = plan.coordinator(correction)
        self._open[number] = coordinator
        return coordinator.table.digest

    def start(self, number: int, rank: int) -> Assignment | None:
        """The first pull of a rank's call. A call that is made again means that its first worker died."""
        return self._open[number].start(rank) if number in self._open else None

    def done_and_pull(
        self, number: int, rank: int, lease: int, seconds: float | None
    ) -> tuple[bool, Assignment | None]:
        if number not in self._open:
            return False, None
        return self._open[number].done_and_pull(rank, lease, seconds)

    def ask(self, question: bytes) -> bytes:
        """`start` or `done_and_pull`, named with its arguments by `question`, as JSON; so is the answer, always of two parts.

        Ray carries bytes as they are. Of other arguments it serializes each by itself, which took a quarter of all pulls a second.
        """
        name, *arguments = json.loads(question)
        answer = (True, self.start(*arguments)) if name == "start" else self.done_and_pull(*arguments)
        return json.dumps(answer).encode()

    def lost(self, number: int, rank: int) -> tuple[int, ...]:
        """Takes back what a dead rank had queued, was running or had finished; its rows died with it."""
        return self._open[number].lost(rank)

    def close(self, number: int) -> None:
        self._open.pop(number, None)


class RemoteUnits:
    """One rollout of an `OpenRollouts` actor as a rank's `UnitSource`: one round trip a call of the engine."""

    def __init__(self, actor: Any, number: int) -> None:
        self._actor = actor
        self._number = number

    def pull(self, rank: int) -> Assignment | None:
        return self._ask("start", rank)[1]

    def done_and_pull(self, rank: int, lease: int, seconds: float | None) -> tuple[bool, Assignment | None]:
        return self._ask("done_and_pull", rank, lease, seconds)

    def _ask(self, name: str, *arguments: Any) -> tuple[bool, Assignment | None]:
        question = json.dumps((name, self._number, *arguments)).encode()
        counted, found = json.loads(ray.get(self._actor.ask.remote(question)))
        if found is None:
            return counted, None
        lease, rank, unit_ids, cost, stolen = found
        return counted, Assignment(lease, rank, tuple(unit_ids), cost, stolen)


@dataclass(frozen=True)
class Share:
    """One rank's part in a rollout: the plan, who it is in it, and the ranks' coordinator where there is one."""

    plan: RolloutPlan
    rank: int
    number: int
    actor: Any | None = None

    def source(self) -> UnitSource:
        """Where the rank pulls from."""
        return self.plan.coordinator() if self.actor is None else RemoteUnits(self.actor, self.number)


def start_coordinator() -> Any:
    """Starts the actor. It needs no core of its own: a call takes microseconds."""
    return ray.remote(num_cpus=0)(OpenRollouts).remote()
