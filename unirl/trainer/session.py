# SPDX-License-Identifier: Apache-2.0
"""A run while it is alive: cluster, slabs, run directory, sinks; and the order in which they end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from unirl.config import to_plain
from unirl.distributed import failpoints
from unirl.distributed.cluster import cluster, find_devices
from unirl.distributed.failures import WriteFailed
from unirl.distributed.launch import slabs
from unirl.distributed.slabs import RolloutSlab, TrainSlab
from unirl.distributed.supervisor import Supervisor
from unirl.distributed.teardown import ended_by
from unirl.metrics import ConsoleSink, MultiSink, open_sinks
from unirl.progress import reached
from unirl.trainer.checkpoints import Resumable
from unirl.trainer.preflight import Plan


class Session:
    """What a trainer's loop works with. Made by `open_session`."""

    def __init__(
        self,
        plan: Plan,
        train: TrainSlab,
        rollout: RolloutSlab,
        supervisor: Supervisor,
        sinks: MultiSink,
        console: ConsoleSink,
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.requests = plan.requests
        self.run_dir = plan.run_dir
        self.train = train
        self.rollout = rollout
        self.checkpoints = plan.checkpoints
        self.first_rollout = plan.checkpoints.first_rollout
        self._supervisor = supervisor
        self._sinks = sinks
        self._console = console
        self._warned: set[str] = set()
        self._num_failed_writes = 0
        self._metrics: dict[str, Any] = {}
        self._begin = time.perf_counter()

    def note(self, metrics: dict[str, Any]) -> None:
        """Adds numbers to the current rollout's line."""
        self._metrics.update(metrics)

    def warn(self, texts: Sequence[str]) -> None:
        """Shows each warning above the live line, once a run."""
        for text in texts:
            if text not in self._warned:
                self._warned.add(text)
                self._console.message(f"warning: {text}")

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to `perf/<phase>_s`."""
        reached(phase)
        begin = time.perf_counter()
        yield
        key = f"perf/{phase}_s"
        self._metrics[key] = self._metrics.get(key, 0.0) + time.perf_counter() - begin

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """For blocks that write into the run directory: a failure is as grave as `checkpoint.on_error` says."""
        try:
            yield
        except OSError as error:
            self._num_failed_writes += 1
            said = f"{what} could not be written to {self.run_dir.path}: {getattr(error, 'cause', error)}"
            if self.config.checkpoint.on_error == "stop":
                raise WriteFailed(f"{said}; the run stops (checkpoint.on_error: stop)") from error
            self.warn([f"{said}; the run goes on (checkpoint.on_error: continue)"])

    def save(self, trainer: Resumable, rollout: int) -> None:
        """Begins checkpoint `rollout`, when the one before it is on disk."""
        self.settle_checkpoint()
        with self.writing(f"checkpoint {rollout}"):
            self.checkpoints.save(self.train, trainer, rollout)

    def settle_checkpoint(self, *, wait: bool = True) -> None:
        """Says how the last checkpoint went, if it is known by now, or waits for it."""
        with self.writing(f"checkpoint {self.checkpoints.last_saved}"):
            self.train.written(wait=wait)

    def score(self, step: int, metrics: dict[str, float]) -> None:
        """Notes an evaluation's numbers, and the reward beside the checkpoint of the same step."""
        self.note(metrics)
        if self.checkpoints.last_saved == step and "eval/reward" in metrics:
            self.settle_checkpoint()
            with self.writing(f"the score of checkpoint {step}"):
                self.checkpoints.score(step, metrics["eval/reward"])

    def write(self, step: int) -> None:
        """Ends the current line: `metrics.jsonl`, the other sinks, the console."""
        self.settle_checkpoint(wait=False)
        now = time.perf_counter()
        self._metrics["perf/step_s"] = now - self._begin
        self._begin = now
        if self._supervisor.num_restarts:
            self._metrics["workers/restarts"] = self._supervisor.num_restarts
        if self._supervisor.num_spared:
            self._metrics["workers/left_out"] = self._supervisor.num_spared
        if self._num_failed_writes:
            self._metrics["checkpoint/failed_writes"] = self._num_failed_writes
        metrics, self._metrics = self._metrics, {}
        with self.writing("the metrics"):
            self._sinks.write(step, metrics)
        reached("written")


@contextmanager
def open_session(plan: Plan) -> Iterator[Session]:
    """Starts what the plan needs. On the way out everything is closed, and the first exception is the one that is seen."""
    config, run_dir = plan.config, plan.run_dir
    failpoints.arm("driver")
    print(plan.text, flush=True)
    first_rollout = plan.checkpoints.first_rollout
    with ExitStack() as stack:
        stack.enter_context(run_dir.claimed())
        stack.enter_context(cluster(config))
        console = ConsoleSink(config.num_rollouts, first_step=first_rollout, mode=config.logging.console)
        train, rollout, supervisor = stack.enter_context(
            slabs(config, find_devices(config), run_dir.logs, notice=console.message)
        )
        run_dir.create(config, plan.text, first_rollout)
        sinks = open_sinks(
            run_dir.path,
            tensorboard=config.logging.tensorboard,
            wandb=config.logging.wandb,
            wandb_project=config.logging.wandb_project,
            config=to_plain(config),
            first_step=first_rollout,
            extra=[console],
        )
        stack.enter_context(ended_by("closing the metrics", sinks.close))
        session = Session(plan, train, rollout, supervisor, sinks, console)
        stack.enter_context(ended_by("finishing the last checkpoint", session.settle_checkpoint))
        yield session
