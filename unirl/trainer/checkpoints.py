# SPDX-License-Identifier: Apache-2.0
"""When a run starts from a checkpoint, and what it puts into one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from unirl.config import RunConfig
from unirl.distributed.slabs import Group, TrainSlab
from unirl.train.checkpoint import (
    CheckpointDamaged,
    latest_checkpoint,
    set_aside_after,
    set_score,
    verify,
)
from unirl.trainer.rundir import AUTO, RunDir


class Resumable(Protocol):
    """A trainer, as checkpoints see it."""

    def state_dict(self) -> tuple[dict[str, Any], list[Group]]:
        """Plain counts, and finished groups that have not been trained yet."""

    def load_state_dict(self, counts: dict[str, Any], groups: list[Group]) -> None:
        """Takes up what `state_dict` gave."""


class RunCheckpoints:
    """The checkpoints of one run directory.

    `resume: auto` takes the newest one in `run_dir` (none there: the run starts from the beginning); a path takes that one.
    Raises `CheckpointDamaged`, a `ValueError`, for one that is partial or altered, and names the one before it.
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
        self.last_saved = self.first_rollout
        """Number of the newest checkpoint of this run, on disk or on its way; 0 when there is none."""

    @property
    def first_rollout(self) -> int:
        """The rollout to go on with; checkpoint n was taken after n rollouts."""
        return 0 if self.path is None else int(self.path.name.removeprefix("step_"))

    def restore(self, train: TrainSlab, trainer: Resumable) -> None:
        """Loads the checkpoint, if there is one, into the training slab and the trainer.

        Later ones in the folder are of a future that is being left: they are set aside, or `auto` would take them next time.
        """
        if self.path is not None:
            trainer.load_state_dict(*train.restore(self.path))
        set_aside_after(self._root, self.first_rollout)

    def save(self, train: TrainSlab, trainer: Resumable, rollout: int) -> None:
        """Begins to write checkpoint `rollout`; `train.written` says how it went."""
        counts, groups = trainer.state_dict()
        self.last_saved = rollout
        train.save(self._root, rollout, counts, groups)

    def score(self, rollout: int, score: float) -> None:
        """Notes an evaluation's reward with checkpoint `rollout`, where there is one; the one of the highest is kept."""
        path = self._root / f"step_{rollout:06d}"
        if path.is_dir():
            set_score(path, score)
