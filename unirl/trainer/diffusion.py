# SPDX-License-Identifier: Apache-2.0
"""The synchronous trainer: generate, score, train and push in turn, colocated or on two slabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unirl.config import RunConfig
from unirl.distributed.slabs import Group
from unirl.train.plan import plan_updates
from unirl.train.stack import merge_results
from unirl.trainer.batch import batch_seconds, batch_warnings, build_batch, canvas_metrics
from unirl.trainer.evaluation import evaluate
from unirl.trainer.preflight import preflight
from unirl.trainer.session import Session, open_session
from unirl.trainer.summary import train_warnings
from unirl.trainer.timelines import schedule_metrics, write_timelines


class DiffusionTrainer:
    """GRPO on a diffusion model.

    Constructing it checks the whole recipe and starts nothing; `run` does the rest and returns the run directory.
    """

    asynchronous = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.plan = preflight(config, asynchronous=self.asynchronous)

    def run(self) -> Path:
        """Trains to `num_rollouts`; leaves metrics, samples, checkpoints and the adapter in `run_dir`."""
        with open_session(self.plan) as self.session:
            self._restore()
            self._loop(self.session)
            self._finish()
        return self.plan.run_dir.path

    def _loop(self, session: Session) -> None:
        for rollout_id in range(session.first_rollout, self.config.num_rollouts):
            self._evaluate_if_due(rollout_id)
            groups = session.rollout.generate(session.requests.training(rollout_id))
            self._train_on(groups, rollout_id)
            self._push_if_due(rollout_id)
            self._save_if_due(rollout_id)
            session.write(rollout_id)

    # ---- the steps of the loop

    def _restore(self) -> None:
        """Takes up a checkpoint, if there is one, and gives the rollout engine the weights that belong to it."""
        self.push_version = 0
        self.session.checkpoints.restore(self.session.train, self)
        self._push(self.push_version)

    def _train_on(self, groups: Sequence[Group], rollout_id: int) -> None:
        session = self.session
        rows, reward_metrics = build_batch(groups, self.config, rollout_id)
        session.note(reward_metrics | batch_seconds(groups) | canvas_metrics(rows))
        session.note(schedule_metrics(groups))
        session.warn(batch_warnings(rows))
        write_timelines(session.run_dir.timelines, rollout_id, groups)
        plan = plan_updates(
            rows.group_ids,
            rows.canvases(),
            self.plan.row_costs.training(rows),
            len(session.train.actors),
            self.config.stack.num_updates_per_batch,
            self.config.stack.micro_batch_size,
            weights=rows.live_weights().tolist(),
        )
        if self.config.parity.store_interval and rollout_id % self.config.parity.store_interval == 0:
            with session.timed("store"), session.writing(f"rollout {rollout_id}"):
                session.train.store_rollout(session.run_dir.parity, rollout_id, rows)
        with session.timed("train"):
            results = session.train.train(rows, plan)
        session.note(merge_results(results))
        session.warn(train_warnings(results))

    def _push_if_due(self, rollout_id: int) -> None:
        if self._push_is_due(rollout_id):
            self._push(self.push_version + 1)

    def _push_is_due(self, rollout_id: int) -> bool:
        done = rollout_id + 1
        return done % self.config.weight_sync_interval == 0 or done == self.config.num_rollouts

    def _push(self, version: int) -> None:
        """Sends the current weights and has every receiver prove, from its live parameters, that they landed."""
        with self.session.timed("push"):
            self.session.rollout.load(self.session.train.build_push(version))
            self.session.train.keep_pushed(version)
        self.push_version = version

    def _evaluate_if_due(self, rollout_id: int) -> None:
        interval = self.config.eval_interval
        if self.session.requests.eval_sets and (rollout_id == 0 or (interval and rollout_id % interval == 0)):
            self._evaluate(rollout_id)

    def _evaluate(self, step: int) -> None:
        """The sync trainers push first: the averaged weights, where there are any, and afterwards the live ones again."""
        with self._averaged_weights(step):
            self._measure(step)
        self.session.rollout.sleep()
        self.session.rollout.wake()

    @contextmanager
    def _averaged_weights(self, step: int) -> Iterator[None]:
        """The engine holds the EMA inside the block; before the first step and without an EMA nothing changes."""
        if self.config.optim.ema.decay == 0 or step == 0:
            yield
            return
        session = self.session
        if self.config.layout == "colocate":
            session.train.swap_average()
            yield
            session.train.swap_average()
        else:
            session.rollout.load(session.train.build_push(self.push_version, average=True))
            yield
            session.rollout.load(session.train.build_push(self.push_version))

    def _measure(self, step: int) -> None:
        session = self.session
        with session.timed("eval"):
            session.score(step, evaluate(session, step))

    def _save_if_due(self, rollout_id: int) -> None:
        done, interval = rollout_id + 1, self.config.save_interval
        if (interval and done % interval == 0) or done == self.config.num_rollouts:
            self._save(done)

    def _save(self, rollout: int) -> None:
        with self.session.timed("save"):
            self.session.save(self, rollout)

    def _finish(self) -> None:
        """The last evaluation, of the weights that are exported, and the adapter."""
        last = self.config.num_rollouts
        if self.session.requests.eval_sets:
            with self._averaged_weights(last):
                self._measure(last)
            self.session.write(last)
        if self.config.model.train == "lora":
            with self.session.writing("the adapter"):
                self.session.train.export_adapter(
                    str(self.plan.run_dir.adapter), average=self.config.optim.ema.decay > 0
                )

    # ---- what a checkpoint holds beside the training ranks' state

    def state_dict(self) -> tuple[dict[str, Any], list[Group]]:
        """Plain counts, and finished groups that have not been trained yet."""
        return {"push_version": self.push_version}, []

    def load_state_dict(self, counts: dict[str, Any], groups: list[Group]) -> None:
        """Takes up what `state_dict` gave."""
        self.push_version = int(counts["push_version"])
