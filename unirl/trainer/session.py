# SPDX-License-Identifier: Apache-2.0
"""A run while it is alive: cluster, slabs, run directory, sinks; and the order in which they end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from unirl.config import to_plain
from unirl.distributed.cluster import connect, disconnect, find_devices
from unirl.distributed.slabs import RolloutSlab, TrainSlab, build_slabs
from unirl.metrics import ConsoleSink, MultiSink, open_sinks
from unirl.trainer.preflight import Plan


class Session:
    """What a trainer's loop works with. Made by `open_session`."""

    def __init__(
        self,
        plan: Plan,
        train: TrainSlab,
        rollout: RolloutSlab,
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
        self._sinks = sinks
        self._console = console
        self._warned: set[str] = set()
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
        begin = time.perf_counter()
        yield
        key = f"perf/{phase}_s"
        self._metrics[key] = self._metrics.get(key, 0.0) + time.perf_counter() - begin

    def write(self, step: int) -> None:
        """Ends the current line: `metrics.jsonl`, the other sinks, the console."""
        now = time.perf_counter()
        self._metrics["perf/step_s"] = now - self._begin
        self._begin = now
        metrics, self._metrics = self._metrics, {}
        self._sinks.write(step, metrics)


@contextmanager
def open_session(plan: Plan) -> Iterator[Session]:
    """Starts what the plan needs. On the way out everything is closed, and the first exception is the one that is seen."""
    config = plan.config
    print(plan.text, flush=True)
    first_rollout = plan.checkpoints.first_rollout
    with ExitStack() as stack:
        if connect(config):
            stack.callback(disconnect)
        devices = find_devices(config)
        train, rollout, end = build_slabs(config, devices)
        stack.callback(end)
        plan.run_dir.create(config, plan.text)
        console = ConsoleSink(config.num_rollouts, first_step=first_rollout, mode=config.logging.console)
        sinks = open_sinks(
            plan.run_dir.path,
            tensorboard=config.logging.tensorboard,
            wandb=config.logging.wandb,
            wandb_project=config.logging.wandb_project,
            config=to_plain(config),
            first_step=first_rollout,
            extra=[console],
        )
        stack.callback(sinks.close)
        yield Session(plan, train, rollout, sinks, console)
