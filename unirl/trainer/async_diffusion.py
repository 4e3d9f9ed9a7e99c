# SPDX-License-Identifier: Apache-2.0
"""The asynchronous trainer: generation and scoring run on the rollout slab while the training slab trains."""

from __future__ import annotations

from typing import Any

from unirl.config import RunConfig
from unirl.distributed.slabs import Group
from unirl.rollout.async_runtime import AsyncRolloutScheduler, drained_at_exit
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.session import Session
from unirl.trainer.summary import staleness_metrics


class AsyncDiffusionTrainer(DiffusionTrainer):
    """`DiffusionTrainer` with a buffer of finished groups between the slabs and a bounded policy lag.

    What is in flight is drained before a push, an evaluation, a checkpoint, and at teardown. An evaluation measures the policy
    that the rollout engine holds: it pushes nothing, and leaves version, engine and buffer as they were.
    """

    asynchronous = True

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.scheduler: AsyncRolloutScheduler

    def _restore(self) -> None:
        config = self.config
        self.scheduler = AsyncRolloutScheduler(
            self.session.rollout.dispatcher,
            self.session.requests.training,
            groups_per_step=config.batch_size,
            num_rollouts=config.num_rollouts,
            max_inflight=config.max_inflight,
            weight_sync_interval=config.weight_sync_interval,
            buffer_max_staleness=config.buffer_max_staleness,
            buffer_order=config.buffer_order,
            reap_before_launch=config.reap_before_launch,
            deterministic=config.deterministic,
        )
        super()._restore()

    def _loop(self, session: Session) -> None:
        with drained_at_exit(self.scheduler):
            for rollout_id in range(session.first_rollout, self.config.num_rollouts):
                self._evaluate_if_due(rollout_id)
                with session.timed("wait"):
                    groups = self.scheduler.next_step(rollout_id)
                session.note(staleness_metrics(self.scheduler.stats))
                self._train_on(groups, rollout_id)
                self._push_if_due(rollout_id)
                self._save_if_due(rollout_id)
                session.write(rollout_id)

    def _push_if_due(self, rollout_id: int) -> None:
        if self._push_is_due(rollout_id):
            with self.session.timed("drain"):
                self.scheduler.drain()
            self._push(self.push_version + 1)
            self.scheduler.on_push()

    def _evaluate(self, step: int) -> None:
        with self.session.timed("drain"):
            self.scheduler.drain()
        self._measure(step)

    def _save(self, rollout: int) -> None:
        self.scheduler.drain()
        super()._save(rollout)

    def state_dict(self) -> tuple[dict[str, Any], list[Group]]:
        counts, groups = self.scheduler.state_dict()
        return {"push_version": self.push_version, "scheduler": counts}, groups

    def load_state_dict(self, counts: dict[str, Any], groups: list[Group]) -> None:
        super().load_state_dict(counts, [])
        self.scheduler.load_state_dict(counts["scheduler"], groups)
