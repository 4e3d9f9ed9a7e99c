# SPDX-License-Identifier: Apache-2.0
"""The Ray actors. They hold no logic: each call goes to a plain object of `sides` or to a transport."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch

from unirl.config import RunConfig
from unirl.distributed.collective import join_group, open_store
from unirl.distributed.coordinator import Share
from unirl.distributed.models import build_model
from unirl.distributed.payload import SegmentPayload, pack_segment, unpack_segment
from unirl.distributed.pinning import pin_process
from unirl.distributed.process import WatchedProcess
from unirl.distributed.sides import RolloutSide, TrainSide
from unirl.progress import reached
from unirl.protocols import WeightPush
from unirl.reward.stack import ScoredRows
from unirl.train.plan import RankPlan
from unirl.train.stack import TrainResult
from unirl.types import LatentSegment, Part, Sample


class Worker(WatchedProcess):
    """One rank of a slab: a training side, a rollout side, or both on one model (colocated).

    `who` is its name for tests of crashes, `log` where its output goes, `place` its number among the workers of its node.
    """

    def __init__(
        self, config: RunConfig, rank: int, who: str, log: str, place: int, *, trains: bool, generates: bool
    ) -> None:
        self.begin(who, log)
        torch.set_num_threads(config.threads_per_worker)
        self._config = config
        self._rank = rank
        self._place = place
        self._trains = trains
        self._generates = generates
        self._store: Any = None
        self._segments: dict[int, LatentSegment] = {}
        self._next_key = 0
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._written: Future[None] | None = None
        self.train_side: TrainSide | None = None
        self.rollout_side: RolloutSide | None = None

    def open_store(self, world_size: int) -> tuple[str, int]:
        """Opens the rendezvous of the training group on this rank's node; returns its address."""
        self._store, address = open_store(ray.util.get_node_ip_address(), world_size)
        return address

    def build(self, store_address: tuple[str, int] | None, world_size: int) -> None:
        """Builds the model and the sides. Ranks of the training slab meet at `store_address`."""
        reached("build")
        if self._config.pin_workers:
            print("bound to cores", *pin_process(self._place, self._config.threads_per_worker))
        model, stage = build_model(self._config, rollout_only=not self._trains)
        if self._trains:
            collective = join_group(
                self._rank,
                world_size,
                self._store or store_address,
                timeout_s=self._config.worker_timeout_s,
            )
            self.train_side = TrainSide(self._config, model, stage, collective)
        if self._generates:
            self.rollout_side = RolloutSide(self._config, model, stage, owns_model=not self._trains)

    def train(self, rows: Part, plan: RankPlan, objects: list[Any], *payloads: SegmentPayload) -> TrainResult:
        """One training step on this rank's rows; `payloads` are the contents of `objects`, in order."""
        reached("train")
        stored = {key: unpack_segment(p) for key, p in zip(objects, payloads, strict=True)}
        return self._train.train(rows, plan, stored)

    def store_rollout(
        self, root: str, number: int, rows: Part, objects: list[Any], *payloads: SegmentPayload
    ) -> None:
        """Stores a whole rollout; `payloads` are the contents of `objects`, in order."""
        stored = {key: unpack_segment(p) for key, p in zip(objects, payloads, strict=True)}
        self._train.store_rollout(root, number, rows.replace(segment=rows.segment.resolve(stored)))

    def build_push(self, push_version: int, average: bool) -> WeightPush:
        reached("build_push")
        return self._train.stack.build_push(push_version, average=average)

    def keep_pushed(self, push_version: int) -> None:
        self._train.stack.keep_pushed(push_version)

    def swap_average(self) -> None:
        self._train.stack.swap_average()

    def save(
        self,
        root: str,
        number: int,
        trainer: Any,
        lights: list[Sample],
        objects: list[Any],
        *payloads: SegmentPayload,
    ) -> None:
        """Writes a checkpoint, or with `checkpoint.background` starts to: `written` then says how it went.

        `lights` are the buffered groups; `payloads` are the contents of `objects`, in order.
        """
        reached("save")
        stored = {key: unpack_segment(p) for key, p in zip(objects, payloads, strict=True)}
        buffered = [
            s.replace_frontier(s.frontier.replace(segment=s.frontier.segment.resolve(stored))) for s in lights
        ]
        background = self._config.checkpoint.background
        write = self._train.prepare_save(root, number, trainer, buffered, copied=background)
        self._written = self._writer.submit(write)
        if not background:
            self._written.result()

    @ray.method(concurrency_group="save")
    def written(self) -> None:
        """Waits for the last checkpoint to be on disk; raises what writing it raised."""
        assert self._written is not None
        self._written.result()

    def restore(self, path: str) -> tuple[Any, list[Sample]]:
        reached("restore")
        return self._train.restore(path)

    def export_adapter(self, folder: str, average: bool) -> None:
        self._train.stack.export_adapter(folder, average=average)

    def generate(
        self, request: Sample, share: Share | None = None
    ) -> tuple[ScoredRows, SegmentPayload | int | None]:
        """(light rows, trajectories): published as a second result, or kept here under a key (`colocate_store`)."""
        reached("generate")
        done, segment = self._rollout.generate(request, self._rank, share)
        reached("generated")
        if segment is None:
            return done, None
        if self._config.transport_kind == "object_store":
            return done, pack_segment(segment)
        self._segments[self._next_key] = segment
        self._next_key += 1
        return done, self._next_key - 1

    def score(self, rows: Part) -> ScoredRows:
        return self._rollout.score(rows, self._rank)

    def send_segment(self, key: int) -> SegmentPayload:
        """Hands a kept trajectory over, once. As a call on this actor it waits for what the actor is doing."""
        return pack_segment(self._segments.pop(key))

    def evaluate(self, request: Sample) -> Sample:
        reached("evaluate")
        return self._rollout.evaluate(request)

    def load(self, push: WeightPush) -> tuple[int, int]:
        reached("load")
        digest = self._rollout.load(push)
        reached("loaded")
        return digest

    def sleep(self) -> None:
        self._rollout.engine.sleep()

    def wake(self) -> None:
        self._rollout.engine.wake()

    @property
    def _train(self) -> TrainSide:
        assert self.train_side is not None
        return self.train_side

    @property
    def _rollout(self) -> RolloutSide:
        assert self.rollout_side is not None
        return self.rollout_side
