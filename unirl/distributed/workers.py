# SPDX-License-Identifier: Apache-2.0
"""The Ray actors. They hold no logic: each call goes to a plain object of `sides` or to a transport."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
import torch

from unirl.config import RunConfig
from unirl.distributed.collective import join_group, open_store
from unirl.distributed.coordinator import Share
from unirl.distributed.models import build_model
from unirl.distributed.payload import SegmentPayload, pack_segment, unpack_segment
from unirl.distributed.sides import RolloutSide, TrainSide
from unirl.protocols import WeightPush
from unirl.reward.stack import ScoredRows
from unirl.train.plan import RankPlan
from unirl.train.stack import TrainResult
from unirl.types import LatentSegment, Part, Sample


class Worker:
    """One rank of a slab: a training side, a rollout side, or both on one model (colocated)."""

    def __init__(self, config: RunConfig, rank: int, *, trains: bool, generates: bool) -> None:
        torch.set_num_threads(config.threads_per_worker)
        self._config = config
        self._rank = rank
        self._trains = trains
        self._generates = generates
        self._store: Any = None
        self._segments: dict[int, LatentSegment] = {}
        self._next_key = 0
        self.train_side: TrainSide | None = None
        self.rollout_side: RolloutSide | None = None

    def where(self) -> tuple[str, int]:
        """(host name, process id), for error messages and for tests that end a worker."""
        return socket.gethostname(), os.getpid()

    def open_store(self, world_size: int) -> tuple[str, int]:
        """Opens the rendezvous of the training group on this rank's node; returns its address."""
        self._store, address = open_store(ray.util.get_node_ip_address(), world_size)
        return address

    def build(self, store_address: tuple[str, int] | None, world_size: int) -> None:
        """Builds the model and the sides. Ranks of the training slab meet at `store_address`."""
        model, stage = build_model(self._config, rollout_only=not self._trains)
        if self._trains:
            collective = join_group(self._rank, world_size, self._store or store_address)
            self.train_side = TrainSide(self._config, model, stage, collective)
        if self._generates:
            self.rollout_side = RolloutSide(self._config, model, stage, owns_model=not self._trains)

    def train(self, rows: Part, plan: RankPlan, objects: list[Any], *payloads: SegmentPayload) -> TrainResult:
        """One training step on this rank's rows; `payloads` are the contents of `objects`, in order."""
        stored = {key: unpack_segment(p) for key, p in zip(objects, payloads, strict=True)}
        return self._train.train(rows, plan, stored)

    def build_push(self, push_version: int, average: bool) -> WeightPush:
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
        score: float | None,
        lights: list[Sample],
        objects: list[Any],
        *payloads: SegmentPayload,
    ) -> None:
        """Writes a checkpoint. `lights` are the buffered groups; `payloads` are the contents of `objects`, in order."""
        stored = {key: unpack_segment(p) for key, p in zip(objects, payloads, strict=True)}
        buffered = [
            s.replace_frontier(s.frontier.replace(segment=s.frontier.segment.resolve(stored))) for s in lights
        ]
        self._train.save(root, number, trainer, buffered, score)

    def restore(self, path: str) -> tuple[Any, list[Sample]]:
        return self._train.restore(path)

    def export_adapter(self, folder: str, average: bool) -> None:
        self._train.stack.export_adapter(folder, average=average)

    def generate(
        self, request: Sample, share: Share | None = None
    ) -> tuple[ScoredRows, SegmentPayload | int | None]:
        """(light rows, trajectories): published as a second result, or kept here under a key (`colocate_store`)."""
        done, segment = self._rollout.generate(request, self._rank, share)
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
        return self._rollout.evaluate(request)

    def load(self, push: WeightPush) -> tuple[int, int]:
        return self._rollout.load(push)

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
