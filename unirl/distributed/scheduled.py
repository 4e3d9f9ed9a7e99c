# SPDX-License-Identifier: Apache-2.0
"""Generations under a schedule: every rank gets the whole request and pulls; the work of a rank that dies goes to the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray import get, put
from ray.exceptions import RayActorError, RayTaskError

from unirl.distributed.coordinator import Share, start_coordinator
from unirl.reward.stack import ScoredRows
from unirl.schedule.plan import RolloutPlan
from unirl.types import Sample

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DoneShare:
    """What one rank did: light rows here, its trajectories where `store` says."""

    actor: Any
    rows: ScoredRows
    store: Any


@dataclass(eq=False)
class _Generation:
    """A request on its way. `running` maps the reference of a rank's light rows to who runs it."""

    request: Sample
    request_ref: Any
    plan: RolloutPlan
    number: int = -1
    running: dict[Any, tuple[Any, int, Any]] = field(default_factory=dict)
    done: list[DoneShare] = field(default_factory=list)
    error: Exception | None = None
    num_deaths: int = 0


class ScheduledDispatcher:
    """A `Dispatcher` for ranks that pull their units.

    Args:
        actors: the slab's workers, with `generate(request, share)`. One that dies is taken out of this very list.
        ray: the module, or what watches the workers with its `get`, `wait` and `kill`.
        plan_fn: (request, number of ranks) to a plan whose owners are positions in `actors`.
        collect_fn: (request, what the ranks did) to groups. Rows are in any order; it puts them back and verifies them.

    When a rank dies, its units, unstarted, running and finished alike, go to the ranks that still pull; what is missing when all
    have ended is planned anew over those that live. A rank that is started again and begins anew gives back what it had in
    the same way. A row is taken from the one call that returned it, so none is done twice. An exception of a rank's
    own is no death: `collect` raises it, and nothing is tried again.
    """

    def __init__(
        self,
        actors: list[Any],
        *,
        ray: Any,
        plan_fn: Callable[[Sample, int], RolloutPlan],
        collect_fn: Callable[[Sample, Sequence[DoneShare]], Sequence[Any]],
    ) -> None:
        self._actors = actors
        self._ray = ray
        self._rank_of = {actor: rank for rank, actor in enumerate(actors)}
        self._plan_fn = plan_fn
        self._collect_fn = collect_fn
        self._coordinator: Any = None
        self._next_number = 0

    def launch(self, request: Sample) -> _Generation:
        plan = self._plan_fn(request, len(self._actors))
        generation = _Generation(request, put(request), plan)
        self._start(generation, plan)
        return generation

    def is_ready(self, generation: _Generation) -> bool:
        self._advance(generation, timeout_s=0)
        return not generation.running

    def wait(self, generation: _Generation) -> None:
        while generation.running:
            self._advance(generation, timeout_s=None)

    def collect(self, generation: _Generation) -> Sequence[Any]:
        self.wait(generation)
        if generation.error is not None:
            raise generation.error
        return self._collect_fn(generation.request, generation.done)

    # ---- a round: every live rank is told once, and ends when it is given nothing more

    def _start(self, generation: _Generation, plan: RolloutPlan) -> None:
        generation.plan, generation.number, generation.num_deaths = plan, self._next_number, 0
        self._next_number += 1
        actor = None
        if plan.needs_coordinator:
            if self._coordinator is None:
                self._coordinator = start_coordinator()
            actor = self._coordinator
            digest = get(actor.open.remote(generation.number, plan))
            assert digest == plan.unit_table().digest, "coordinator and driver derived different units"
        for rank, worker in enumerate(self._actors):
            share = Share(plan, rank, generation.number, actor)
            light, store = worker.generate.options(num_returns=2).remote(generation.request_ref, share)
            generation.running[light] = (worker, rank, store)

    def _advance(self, generation: _Generation, timeout_s: float | None) -> None:
        """Takes what has ended, waiting for one more unless told not to."""
        running = generation.running
        if not running:
            return
        ended, _ = self._ray.wait(
            list(running), num_returns=len(running) if timeout_s == 0 else 1, timeout=timeout_s
        )
        for light in ended:
            worker, rank, store = running.pop(light)
            try:
                rows: ScoredRows = self._ray.get(light)
            except RayTaskError as error:  # whatever the engine raised; it comes out of collect
                generation.error = generation.error or error
            except RayActorError as error:
                self._bury(generation, worker, rank, error)
            else:
                generation.done.append(DoneShare(worker, self._on_the_slabs_ranks(rows, worker), store))
        if ended and not running:
            self._finish_round(generation)

    def _bury(self, generation: _Generation, worker: Any, rank: int, error: RayActorError) -> None:
        generation.num_deaths += 1
        if worker in self._actors:
            self._actors.remove(worker)
            self._ray.kill(worker)  # it may only be unreachable, and must not go on pulling
            _logger.warning(
                "rollout rank %d died; its work goes to the %d left: %s",
                self._rank_of[worker],
                len(self._actors),
                error,
            )
        if not self._actors:
            generation.error = generation.error or error
        elif generation.plan.needs_coordinator:
            get(self._coordinator.lost.remote(generation.number, rank))

    def _finish_round(self, generation: _Generation) -> None:
        if generation.plan.needs_coordinator:
            self._coordinator.close.remote(generation.number)
        if generation.error is not None or not generation.num_deaths:
            return
        returned = {
            row_id
            for share in generation.done
            if share.rows.sample is not None
            for row_id in share.rows.sample.frontier.ids
        }
        missing = [row_id for row_id in generation.request.frontier.ids if row_id not in returned]
        if missing:
            self._start(generation, generation.plan.restricted(missing, len(self._actors)))

    def _on_the_slabs_ranks(self, rows: ScoredRows, worker: Any) -> ScoredRows:
        """Calls name the rank of the slab: positions in the plan move when a rank dies."""
        rank = self._rank_of[worker]
        return replace(rows, calls=tuple(call._replace(rank=rank) for call in rows.calls))
