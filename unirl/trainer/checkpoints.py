# SPDX-License-Identifier: Apache-2.0
"""When a run starts from a checkpoint, and what it puts into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from unirl.config import RunConfig
from unirl.distributed.slabs import Group, TrainSlab
from unirl.train.checkpoint import CheckpointDamaged, latest_checkpoint, verify
from unirl.trainer.rundir import RunDir

AUTO = "auto"


class Resumable(Protocol):
    """A trainer, as checkpoints see it."""

    def state_dict(self) -> tuple[dict[str, Any], list[Group]]:
        """Plain counts, and finished groups that have not been trained yet."""

    def load_state_dict(self, counts: dict[str, Any], groups: list[Group]) -> None:
        """Takes up what `state_dict` gave."""


class RunCheckpoints:
    """The checkpoints of one run directory.

    `resume: auto` takes the newest one in `run_dir` (none there: the run starts from the beginning); a path takes that one.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir) -> None:
        self._root = run_dir.checkpoints
        self.path: Path | None = None
        if config.resume == AUTO:
            self.path = latest_checkpoint(self._root)
        elif config.resume is not None:
            self.path = Path(config.resume)
        if self.path is not None and (problem := verify(self.path)) is not None:
            older = [p for p in sorted(self._root.glob("step_*")) if p < self.path and verify(p) is None]
            raise CheckpointDamaged(self.path, problem, older[-1] if older else None)

    @property
    def first_rollout(self) -> int:
        """The rollout to go on with; checkpoint n was taken after n rollouts."""
        return 0 if self.path is None else int(self.path.name.removeprefix("step_"))

    def restore(self, train: TrainSlab, trainer: Resumable) -> None:
        """Loads the checkpoint, if there is one, into the training slab and the trainer."""
        if self.path is not None:
            trainer.load_state_dict(*train.restore(self.path))

    def save(self, train: TrainSlab, trainer: Resumable, rollout: int, *, score: float | None = None) -> None:
        """Writes checkpoint `rollout`."""
        counts, groups = trainer.state_dict()
        train.save(self._root, rollout, counts, groups, score=score)
