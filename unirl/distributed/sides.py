# SPDX-License-Identifier: Apache-2.0
"""The logic behind a worker, as plain objects: a training side and a rollout side. Tests drive them without a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from unirl.config import RunConfig
from unirl.distributed.coordinator import Share
from unirl.models.bagel import Bagel, BagelStage
from unirl.protocols import Collective, WeightPush
from unirl.reward import build_scorers
from unirl.reward.stack import RewardStack, ScoredRows
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.train.checkpoint import load_checkpoint, save_checkpoint
from unirl.train.checkpoint_rows import columns_from_tensors, columns_to_tensors
from unirl.train.plan import RankPlan
from unirl.train.stack import TrainResult, TrainStack
from unirl.train.stored_rollout import save_rollout
from unirl.train.weights import apply_push
from unirl.types import LatentSegment, Part, Sample


class TrainSide:
    """Replay and update on one rank."""

    def __init__(self, config: RunConfig, model: Bagel, stage: BagelStage, collective: Collective) -> None:
        self.stack = TrainStack(stage, model, config, collective)
        self._keep_last = config.checkpoint.keep_last

    def train(self, rows: Part, plan: RankPlan, stored: Mapping[Any, LatentSegment]) -> TrainResult:
        """One training step on this rank's rows, whose trajectories are looked up in `stored`."""
        if len(rows):
            rows = rows.replace(segment=rows.segment.resolve(stored))
        return self.stack.train(rows, plan)

    def store_rollout(self, root: str, number: int, rows: Part) -> None:
        """Writes rows that are about to be trained, with the weights that generated them, for `unirl parity`."""
        save_rollout(root, number, rows, self.stack)

    def prepare_save(
        self, root: str, number: int, trainer: Any, buffered: Sequence[Sample], *, copied: bool
    ) -> Callable[[], Any]:
        """What writes checkpoint `number`: this rank's state (equal on all), the trainer's counts, and groups not trained yet.

        With `copied` it holds a copy in host memory, so it may run beside the next training step; else it has to run before.
        """
        state = self.stack.state_dict()
        tensors = state["tensors"]
        if copied:
            tensors = {
                section: {name: t.detach().to("cpu", copy=True) for name, t in named.items()}
                for section, named in tensors.items()
            }
        rows, description = columns_to_tensors(list(buffered), "buffer")
        return partial(
            save_checkpoint,
            root,
            number,
            {**tensors, "buffer": rows},
            {"train": state["counts"], "trainer": trainer, "buffer": description},
            keep_last=self._keep_last,
        )

    def restore(self, path: str) -> tuple[Any, list[Sample]]:
        """Takes up a checkpoint; returns the trainer's counts and the groups that `save` was given."""
        checkpoint = load_checkpoint(path)
        sections = dict(checkpoint.sections)
        buffered = columns_from_tensors(checkpoint.state["buffer"], sections.pop("buffer", {}))
        self.stack.load_state_dict({"tensors": sections, "counts": checkpoint.state["train"]})
        return checkpoint.state["trainer"], buffered


class RolloutSide:
    """Generation and scoring on one rank."""

    def __init__(self, config: RunConfig, model: Bagel, stage: BagelStage, *, owns_model: bool) -> None:
        self.engine = TrainsideEngine(stage, model, apply_push, owns_model=owns_model)
        rewards = build_scorers(config.reward.scorers, "reward.scorers")
        monitors = build_scorers(config.eval.scorers, "eval.scorers")
        self._scores_elsewhere = config.reward.dispatch == "balanced"
        self._rewards = RewardStack(
            self.engine,
            {} if self._scores_elsewhere else rewards,
            micro_batch_size=config.reward_stack.micro_batch_size,
            overlap=config.reward_stack.overlap,
        )
        self._scoring = RewardStack(self.engine, rewards, micro_batch_size=1)
        self._evaluation = RewardStack(
            self.engine, rewards | monitors, micro_batch_size=config.eval.micro_batch_size
        )

    def generate(
        self, request: Sample, rank: int, share: Share | None = None
    ) -> tuple[ScoredRows, LatentSegment | None]:
        """(light rows, which have no trajectories, and images only when they are scored elsewhere; trajectories).

        Without a `share`, all of the request; with one, what its schedule gives to this rank, which may be nothing.
        """
        if share is None:
            done = self._rewards.run_alone(request, rank=rank)
        else:
            done = self._rewards.run_share(request, share.plan, share.rank, share.source())
        if done.sample is None:
            return done, None
        rows = done.sample.frontier
        light = rows.replace(segment=None, media=rows.media if self._scores_elsewhere else None)
        sample = done.sample.replace_frontier(light) if share is None else Sample((light,))
        return dataclasses.replace(done, sample=sample), rows.segment

    def score(self, rows: Part, rank: int) -> ScoredRows:
        """Scores rows that any rank generated."""
        return self._scoring.score_share(rows, rank=rank)

    def evaluate(self, request: Sample) -> Sample:
        """The rows with images and the scores of rewards and monitors; no trajectories."""
        sample = self._evaluation.generate_and_score(request)
        return sample.replace_frontier(sample.frontier.replace(segment=None))

    def load(self, push: WeightPush) -> tuple[int, int]:
        """Installs a push; returns the digest of the live parameters."""
        return self.engine.load(push)
