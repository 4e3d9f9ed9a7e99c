# SPDX-License-Identifier: Apache-2.0
"""Pulling over Ray: the coordinator as an actor, ranks with the real engine, and ranks that die."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.distributed.coordinator import OpenRollouts, RemoteUnits, Share, start_coordinator
from unirl.distributed.scheduled import DoneShare, ScheduledDispatcher
from unirl.models.bagel import BagelStage
from unirl.reward.stack import RewardStack, ScoredRows
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.schedule.cost import TokenCount
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.restore import restore_order
from unirl.schedule.units import Group, Workload, contiguous_owners
from unirl.train.weights import apply_push
from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

ray = pytest.importorskip("ray")

# The first rank owns all large canvases.
CANVASES = [(12, 12)] * 3 + [(8, 8)] * 3
SIBLINGS = 4


class DyingEngine(TrainsideEngine):
    """The real engine, whose process ends in the middle of the call after `calls`. One that is not to die takes its time."""

    calls: int | None = None

    def generate(self, request: Sample) -> Sample:
        if self.calls is None:
            time.sleep(0.05)
        elif self.calls == 0:
            os._exit(1)
        else:
            self.calls -= 1
        return super().generate(request)


class FailingEngine(TrainsideEngine):
    """Cannot do the group `p4`."""

    def generate(self, request: Sample) -> Sample:
        if any(row_id.startswith("r0.p4") for row_id in request.frontier.ids):
            raise ArithmeticError("not finite")
        return super().generate(request)


class Rank:
    """A rollout rank: the loop, the real engine, and nothing else."""

    def __init__(self, base: str, engine_class: type[TrainsideEngine], dies_after: int | None) -> None:
        torch.set_num_threads(1)
        stage = BagelStage.from_pretrained(base)
        engine = engine_class(stage, stage.model, apply_push)
        if isinstance(engine, DyingEngine):
            engine.calls = dies_after
        self.stack = RewardStack(engine, {}, micro_batch_size=2)

    def generate(self, request: Sample, share: Share) -> tuple[ScoredRows, int]:
        return self.stack.run_share(request, share.plan, share.rank, share.source()), os.getpid()


def request() -> Sample:
    params = SamplingParams(
        height=12, width=12, num_inference_steps=2, eta=0.7, rule="flow", noise=NoiseRecipe(0)
    )
    prompts = Part(
        ids=tuple(f"r0.p{index}" for index in range(len(CANVASES))),
        prompts=("a three",) * len(CANVASES),
        metadata=tuple({"canvas": list(canvas)} for canvas in CANVASES),
        params=params,
    )
    sample = Sample((prompts,)).fork(SIBLINGS, params)
    steps = torch.tensor([[0]] * len(sample.frontier))
    return sample.replace_frontier(sample.frontier.replace(sde_steps=steps))


def plan(schedule: str, num_ranks: int) -> RolloutPlan:
    ids = request().frontier.ids
    groups = tuple(
        Group(
            f"r0.p{index}",
            ids[index * SIBLINGS : (index + 1) * SIBLINGS],
            Workload(height * width // 4, 2),
            owner,
        )
        for index, ((height, width), owner) in enumerate(
            zip(CANVASES, contiguous_owners(len(CANVASES), num_ranks), strict=True)
        )
    )
    return RolloutPlan(groups, num_ranks, schedule, TokenCount(), max_rows=2)


@pytest.fixture(scope="module")
def expected(random_base: Path) -> Part:
    stage = BagelStage.from_pretrained(random_base)
    engine = TrainsideEngine(stage, stage.model, apply_push)
    return RewardStack(engine, {}, micro_batch_size=8).generate_and_score(request()).frontier


@pytest.fixture
def slab(ray_cluster: None, random_base: Path) -> Iterator[Any]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actors: list[Any] = []

    def start(
        schedule: str, engines: Sequence[tuple[type[TrainsideEngine], int | None]]
    ) -> tuple[ScheduledDispatcher, list[Any]]:
        actors[:] = [
            ray.remote(num_cpus=0)(Rank).remote(str(random_base), engine, dies) for engine, dies in engines
        ]
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        slab = list(actors)
        dispatcher = ScheduledDispatcher(
            slab, ray=ray, plan_fn=lambda _, ranks: plan(schedule, ranks), collect_fn=lambda *done: done
        )
        return dispatcher, slab

    yield start
    for actor in actors:
        ray.kill(actor)


def rows_of(shares: Sequence[DoneShare]) -> Part:
    """All rows in order; an error when one is missing or came twice."""
    rows = Part.concat([s.rows.sample.frontier for s in shares if s.rows.sample is not None])
    return rows.select(restore_order(request().frontier.ids, rows.ids))


def assert_same(rows: Part, expected: Part) -> None:
    pairs = zip(rows.segment.rows(), expected.segment.rows(), strict=True)
    assert all(torch.equal(row, other) for row, other in pairs)
    assert torch.equal(rows.segment.log_probs, expected.segment.log_probs)
    assert torch.equal(rows.fingerprints, expected.fingerprints)


SLOW = pytest.mark.slow  # starting a worker takes seconds


@pytest.mark.parametrize(
    "schedule", [pytest.param("owner", marks=SLOW), pytest.param("ring", marks=SLOW), "steal"]
)
def test_every_schedule_gives_the_same_rows_on_real_workers(slab: Any, expected: Part, schedule: str) -> None:
    dispatcher, _ = slab(schedule, [(TrainsideEngine, None)] * 2)
    for _ in range(2):
        generation = dispatcher.launch(request())
        dispatcher.wait(generation)
        assert dispatcher.is_ready(generation)
        asked, shares = dispatcher.collect(generation)
        assert asked.frontier.ids == request().frontier.ids
        assert_same(rows_of(shares), expected)
        ranks = {call.rank for share in shares for call in share.rows.calls}
        assert ranks == {0, 1} or (schedule == "steal" and ranks <= {0, 1})


@pytest.mark.parametrize(
    ("schedule", "calls"),
    [
        pytest.param("owner", 2, marks=SLOW),
        pytest.param("ring", 2, marks=SLOW),
        pytest.param("steal", 0, marks=SLOW),
        ("steal", 2),
    ],
)
def test_the_work_of_a_rank_that_dies_is_done_by_the_others_once(
    slab: Any, expected: Part, schedule: str, calls: int
) -> None:
    others = 2 if calls == 0 else 1
    dispatcher, actors = slab(schedule, [(DyingEngine, calls), *[(DyingEngine, None)] * others])
    generation = dispatcher.launch(request())
    _, shares = dispatcher.collect(generation)
    assert_same(rows_of(shares), expected)
    assert len(actors) == others
    assert 0 not in {call.rank for share in shares for call in share.rows.calls}
    _, shares = dispatcher.collect(dispatcher.launch(request()))
    assert_same(rows_of(shares), expected)


@pytest.mark.slow
def test_the_death_of_the_last_rank_comes_out_of_collect(slab: Any) -> None:
    dispatcher, _ = slab("steal", [(DyingEngine, 1), (DyingEngine, 0)])
    generation = dispatcher.launch(request())
    dispatcher.wait(generation)
    with pytest.raises(ray.exceptions.RayActorError):
        dispatcher.collect(generation)


@pytest.mark.slow
def test_what_an_engine_raises_comes_out_of_collect_and_nobody_hangs(slab: Any) -> None:
    dispatcher, actors = slab("steal", [(TrainsideEngine, None), (FailingEngine, None)])
    generation = dispatcher.launch(request())
    dispatcher.wait(generation)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="not finite"):
            dispatcher.collect(generation)
    assert len(actors) == 2


def test_a_slow_rank_is_known_in_the_next_rollout() -> None:
    rollouts = OpenRollouts()
    for number in range(3):
        rollouts.open(number, plan("steal", 2))
        pulled = [rollouts.start(number, rank) for rank in (0, 1)]
        for rank, assignment in enumerate(pulled):
            while assignment is not None:
                seconds = assignment.cost * (3.0 if rank == 0 else 1.0)
                _, assignment = rollouts.done_and_pull(number, rank, assignment.lease, seconds)
        rollouts.close(number)
    correction = rollouts._corrections[2]
    assert correction.ratio(0) == pytest.approx(3.0)
    assert correction.factor(0) > 1.0 > correction.factor(1)


def test_a_rollout_that_is_closed_gives_nothing() -> None:
    rollouts = OpenRollouts()
    digest = rollouts.open(7, plan("steal", 2))
    assert digest == plan("steal", 2).unit_table().digest
    first = rollouts.start(7, 0)
    assert first is not None
    rollouts.close(7)
    assert rollouts.start(7, 1) is None
    assert rollouts.done_and_pull(7, 0, first.lease, 1.0) == (False, None)


@pytest.mark.slow
def test_the_actor_serves_hundreds_of_pulls_a_second(ray_cluster: None) -> None:
    """From 16 callers at once; the benchmark has the figure for 64, on a machine of its own."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    groups = tuple(Group(f"g{i}", tuple(f"g{i}/{r}" for r in range(40)), Workload(16), i) for i in range(16))
    many = RolloutPlan(groups, 16, "steal", TokenCount(), max_rows=1)
    actor = start_coordinator()
    ray.get(actor.open.remote(0, many))

    @ray.remote(num_cpus=0)
    class Caller:
        def run(self, rank: int) -> int:
            units = RemoteUnits(actor, 0)
            count, assignment = 0, units.pull(rank)
            while assignment is not None:
                count += 1
                accepted, assignment = units.done_and_pull(rank, assignment.lease, 0.001)
                assert accepted
            return count

    callers = [Caller.remote() for _ in range(16)]
    ray.get([caller.__ray_ready__.remote() for caller in callers])
    begin = time.perf_counter()
    counts = ray.get([caller.run.remote(rank) for rank, caller in enumerate(callers)])
    wall = time.perf_counter() - begin
    assert sum(counts) == 640
    assert sum(counts) / wall > 100  # a slow machine has some; the benchmark says how many
    for caller in callers:
        ray.kill(caller)
    ray.kill(actor)
