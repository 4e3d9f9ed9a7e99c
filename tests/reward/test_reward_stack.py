# SPDX-License-Identifier: Apache-2.0
"""The micro loop with a real engine: under any schedule and cut, with overlap or without, a row is the same to the bit."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unirl.models.bagel import BagelStage
from unirl.reward.stack import RewardStack, ScoredRows, micro_batches
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.schedule.cost import CostModel, TokenCount
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.restore import restore_order
from unirl.schedule.units import Cost, Group, Workload, contiguous_owners
from unirl.train.weights import apply_push
from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

CANVASES = [(12, 12), (8, 8), (12, 8), (8, 8)]
SIBLINGS = 3


class Brightness:
    """Mean pixel, and the threads it was asked on."""

    name = "brightness"

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def score(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[float]:
        self.threads.add(threading.get_ident())
        return [float(image.mean()) for image in images]


@pytest.fixture(scope="module")
def engine(random_base: Path) -> TrainsideEngine:
    stage = BagelStage.from_pretrained(random_base)
    return TrainsideEngine(stage, stage.model, apply_push)


def request() -> Sample:
    params = SamplingParams(
        height=12, width=12, num_inference_steps=3, eta=0.7, rule="flow", noise=NoiseRecipe(0)
    )
    prompts = Part(
        ids=tuple(f"r0.p{index}" for index in range(len(CANVASES))),
        prompts=tuple(f"a {word}" for word in ("one", "two", "three", "four")),
        metadata=tuple({"canvas": list(canvas)} for canvas in CANVASES),
        params=params,
    )
    sample = Sample((prompts,)).fork(SIBLINGS, params)
    steps = torch.tensor([[0, 2]] * len(sample.frontier))
    return sample.replace_frontier(sample.frontier.replace(sde_steps=steps))


def plan(schedule: str, num_ranks: int = 2, *, cost: Cost | None = None, max_rows: int = 2) -> RolloutPlan:
    frontier = request().frontier
    groups = [
        Group(
            f"r0.p{index}",
            tuple(row_id for row_id in frontier.ids if row_id.startswith(f"r0.p{index}/")),
            Workload(height * width // 4, 3),
            owner,
        )
        for index, ((height, width), owner) in enumerate(
            zip(CANVASES, contiguous_owners(len(CANVASES), num_ranks), strict=True)
        )
    ]
    return RolloutPlan(tuple(groups), num_ranks, schedule, cost or TokenCount(), max_rows, packs_groups=True)


def restored(shares: Sequence[ScoredRows]) -> Part:
    rows = Part.concat([share.sample.frontier for share in shares if share.sample is not None])
    return rows.select(restore_order(request().frontier.ids, rows.ids))


def same(left: Part, right: Part) -> bool:
    assert left.ids == right.ids
    assert left.component_rewards is not None and right.component_rewards is not None
    rewards = torch.equal(left.component_rewards["brightness"], right.component_rewards["brightness"])
    columns = all(
        torch.equal(getattr(left.segment, name), getattr(right.segment, name))
        for name in ("log_probs", "frame_steps", "sde_steps", "token_counts", "sigmas")
    )
    frames = zip(left.segment.latents.rows(), right.segment.latents.rows(), strict=True)
    return (
        rewards
        and columns
        and all(torch.equal(a, b) for a, b in frames)
        and torch.equal(left.fingerprints, right.fingerprints)
    )


def shares_of(
    engine: TrainsideEngine, of: RolloutPlan, *, overlap: bool = False, order: Sequence[int] | None = None
) -> list[ScoredRows]:
    """All ranks in turn, or in threads when they share a coordinator."""
    stack = RewardStack(engine, {"brightness": Brightness()}, micro_batch_size=2, overlap=overlap)
    source = of.coordinator() if of.needs_coordinator else None
    return [stack.run_share(request(), of, rank, source) for rank in order or range(of.num_ranks)]


@pytest.fixture(scope="module")
def unscheduled(engine: TrainsideEngine) -> Part:
    stack = RewardStack(engine, {"brightness": Brightness()}, micro_batch_size=5)
    return stack.generate_and_score(request()).frontier


@pytest.mark.parametrize("schedule", ["owner", "ring", "steal"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_every_schedule_gives_the_rows_of_the_loop_without_one_bit_for_bit(
    engine: TrainsideEngine, unscheduled: Part, schedule: str, overlap: bool
) -> None:
    assert same(restored(shares_of(engine, plan(schedule), overlap=overlap)), unscheduled)


@pytest.mark.parametrize(
    "cost", [CostModel(a=1e-4, c=1e-5), CostModel(a=1e-4, c=1.0)], ids=["small", "large"]
)
def test_adaptive_units_of_any_size_give_the_same_rows(
    engine: TrainsideEngine, unscheduled: Part, cost: CostModel
) -> None:
    shares = shares_of(engine, plan("steal", cost=cost, max_rows=6))
    assert same(restored(shares), unscheduled)


def test_a_rank_that_comes_first_steals_what_the_other_has_not_started(engine: TrainsideEngine) -> None:
    first, second = shares_of(engine, plan("steal"))
    assert second.sample is None and second.calls == ()
    assert first.num_stolen_units == 2 * 2  # two groups of three rows, in units of at most two
    assert first.sample is not None and len(first.sample.frontier) == len(CANVASES) * SIBLINGS


def test_units_of_a_rank_run_dearest_first(engine: TrainsideEngine) -> None:
    (share,) = shares_of(engine, plan("owner", num_ranks=1, max_rows=SIBLINGS))
    calls = [call.canvas for call in share.calls if call.phase == "generate"]
    assert calls == ["12x12", "12x8", "8x8", "8x8"]


def test_calls_say_when_what_ran(engine: TrainsideEngine) -> None:
    begin = time.time()
    (share,) = shares_of(engine, plan("owner", num_ranks=1))
    calls = share.calls
    assert begin <= calls[0].start and calls[-1].end <= time.time()
    assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(calls))
    assert sum(call.num_rows for call in calls if call.phase == "generate") == 12
    for phase in ("generate", "score"):
        seconds = sum(call.end - call.start for call in calls if call.phase == phase)
        assert share.seconds[f"{phase}_s"] == pytest.approx(seconds) and seconds > 0


class SecondCall(TrainsideEngine):
    """Tells when its second call begins."""

    def __init__(self, engine: TrainsideEngine) -> None:
        vars(self).update(vars(engine))
        self.begun = threading.Event()
        self.calls = 0

    def generate(self, request: Sample) -> Sample:
        self.calls += 1
        if self.calls == 2:
            self.begun.set()
        return super().generate(request)


class PatientScorer(Brightness):
    """Scores its first rows when the engine has begun the next call, or after `patience_s`."""

    def __init__(self, engine: SecondCall, patience_s: float) -> None:
        super().__init__()
        self.engine, self.patience_s = engine, patience_s
        self.met: list[bool] = []

    def score(self, *rows: Any) -> Sequence[float]:
        if not self.met:
            self.met.append(self.engine.begun.wait(self.patience_s))
        return super().score(*rows)


@pytest.mark.parametrize(
    ("overlap", "patience_s"), [(True, 60.0), (False, 0.05)], ids=["overlapped", "in turn"]
)
def test_overlapped_scoring_runs_beside_generation(
    engine: TrainsideEngine, overlap: bool, patience_s: float
) -> None:
    watched = SecondCall(engine)
    scorer = PatientScorer(watched, patience_s)
    stack = RewardStack(watched, {"brightness": scorer}, micro_batch_size=2, overlap=overlap)
    stack.generate_and_score(request())
    assert scorer.met == [overlap]
    assert (threading.get_ident() in scorer.threads) is not overlap


def test_scoring_apart_from_generating_gives_the_same_rewards(
    engine: TrainsideEngine, unscheduled: Part
) -> None:
    generated = RewardStack(engine, {}, micro_batch_size=5).generate_and_score(request()).frontier
    assert generated.component_rewards is None
    scoring = RewardStack(engine, {"brightness": Brightness()}, micro_batch_size=1)
    shares = [
        scoring.score_share(generated.select(rows)) for rows in ([7, 3, 11, 0], [1, 2, 4, 5, 6, 8, 9, 10])
    ]
    assert same(restored(shares), unscheduled)


class UnkeyedEngine(TrainsideEngine):
    name = "unkeyed"
    noise_keyed_by_row = False


def test_steal_is_refused_for_an_engine_whose_noise_is_not_keyed_by_row(random_base: Path) -> None:
    stage = BagelStage.from_pretrained(random_base)
    stack = RewardStack(UnkeyedEngine(stage, stage.model, apply_push), {}, micro_batch_size=2)
    stealing = plan("steal")
    with pytest.raises(ValueError, match=r"'steal'.*engine 'unkeyed'.*use 'owner' or 'ring'"):
        stack.run_share(request(), stealing, 0, stealing.coordinator())
    assert stack.run_share(request(), plan("owner"), 0).sample is not None


def test_micro_batches_keep_groups_together_where_they_fit() -> None:
    groups = ["a"] * 3 + ["b"] * 3 + ["c"] * 7
    assert micro_batches(groups, 6) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
    assert micro_batches(groups, 4) == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9], [10, 11, 12]]
