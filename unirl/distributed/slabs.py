# SPDX-License-Identifier: Apache-2.0
"""The driver's view of the workers: a training slab and a rollout slab, which share ranks when colocated."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from unirl.config import RunConfig
from unirl.distributed.cluster import Devices
from unirl.distributed.payload import pack_segment
from unirl.distributed.placement import Slabs
from unirl.distributed.workers import Worker
from unirl.protocols import WeightPush
from unirl.rollout.async_runtime import RayGenerationDispatcher
from unirl.rollout.dispatch import contiguous_shares
from unirl.train.plan import Plan
from unirl.train.stack import TrainResult
from unirl.types import Part, Sample, SegmentRef


@dataclasses.dataclass(frozen=True)
class Group:
    """A finished group of siblings: light rows here, trajectories in a store.

    `seconds` are those of the whole generation that the group came from, and `num_groups` the groups that share them.
    """

    sample: Sample
    seconds: dict[str, float]
    num_groups: int

    @property
    def group_id(self) -> str:
        return self.sample.parts[0].ids[0]

    @property
    def push_version(self) -> int:
        assert self.sample.frontier.push_version is not None
        return int(self.sample.frontier.push_version[0])


class TrainSlab:
    """Rank 0 speaks for the slab where one answer is enough; trainable weights are equal on all ranks."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)

    def train(self, rows: Part, plan: Plan) -> list[TrainResult]:
        """One training step. `plan` says which rows each rank replays, and in which micro-batches."""
        refs = []
        for rank, actor in enumerate(self.actors):
            local_plan = plan.for_rank(rank)
            share = rows.select(local_plan.rows)
            objects = share.segment.objects()
            named = share.replace(segment=_renamed(share.segment, objects))
            refs.append(actor.train.remote(named, local_plan, list(range(len(objects))), *objects))
        return ray.get(refs)

    def build_push(self, push_version: int, *, average: bool = False) -> Any:
        """A reference to the weights of rank 0 as they go over the wire."""
        return self.actors[0].build_push.remote(push_version, average)

    def keep_pushed(self, push_version: int) -> None:
        """Keeps the current adapter as that of a version: rows generated under it may have to be replayed under it."""
        ray.get([a.keep_pushed.remote(push_version) for a in self.actors])

    def swap_average(self) -> None:
        """Exchanges live and averaged weights in place; a second call undoes the first, bit for bit."""
        ray.get([a.swap_average.remote() for a in self.actors])

    def save(
        self, root: Path, number: int, trainer: Any, buffered: Sequence[Group], *, score: float | None = None
    ) -> None:
        """Writes a checkpoint from rank 0: weights and optimizer, the trainer's counts, groups that are not trained yet."""
        objects = list(dict.fromkeys(h for g in buffered for h in g.sample.frontier.segment.objects()))
        lights = []
        for group in buffered:
            rows = group.sample.frontier
            named = rows.replace(segment=_renamed(rows.segment, objects), media=None)
            lights.append(group.sample.replace_frontier(named))
        places = list(range(len(objects)))
        ray.get(self.actors[0].save.remote(str(root), number, trainer, score, lights, places, *objects))

    def restore(self, path: Path) -> tuple[Any, list[Group]]:
        """All ranks take up a checkpoint; its counts, and its groups with their trajectories back in the store."""
        counts, samples = ray.get([a.restore.remote(str(path)) for a in self.actors])[0]
        groups = []
        for sample in samples:
            rows = sample.frontier
            stored = SegmentRef.of(ray.put(pack_segment(rows.segment)), len(rows))
            groups.append(Group(sample.replace_frontier(rows.replace(segment=stored)), {}, 1))
        return counts, groups

    def export_adapter(self, folder: str, *, average: bool) -> None:
        ray.get(self.actors[0].export_adapter.remote(folder, average))


class RolloutSlab:
    """Generation, evaluation and pushes. `dispatcher` serves the async runtime and the sync trainers alike."""

    def __init__(self, actors: Sequence[Any], config: RunConfig) -> None:
        self.actors = list(actors)
        self._config = config
        self.dispatcher = RayGenerationDispatcher(self.actors, ray=ray, collect_fn=self._collect)

    def generate(self, request: Sample) -> list[Group]:
        """Generates and waits: the sync trainers' way."""
        handle = self.dispatcher.launch(request)
        self.dispatcher.wait(handle)
        return list(self.dispatcher.collect(handle))

    def evaluate(self, request: Sample) -> Sample:
        """Generates and scores evaluation rows, images included; touches neither versions nor training's noise."""
        trees = request.split()
        shares = contiguous_shares(len(trees), len(self.actors))
        refs = [
            actor.evaluate.remote(Sample.concat(trees[start:stop]))
            for actor, (start, stop) in zip(self.actors, shares, strict=True)
            if stop > start
        ]
        return Sample.concat(ray.get(refs))

    def load(self, push: Any) -> None:
        """Sends a push (a reference to a `WeightPush`) to every rank and compares digests of what is live there."""
        sent: WeightPush = ray.get(push)
        digests = ray.get([a.load.remote(push) for a in self.actors])
        wrong = [rank for rank, digest in enumerate(digests) if tuple(digest) != tuple(sent.digest)]
        if wrong:
            raise RuntimeError(
                f"push {sent.push_version} did not land on rollout ranks {wrong}: sent digest {sent.digest}, live digests "
                f"{[digests[r] for r in wrong]}"
            )

    def sleep(self) -> None:
        ray.get([a.sleep.remote() for a in self.actors])

    def wake(self) -> None:
        ray.get([a.wake.remote() for a in self.actors])

    def _collect(self, results: list[tuple[Any, Any]]) -> list[Group]:
        """Light rows come here; trajectories stay where they were published, or are fetched from the actor that kept them."""
        begin = time.perf_counter()
        lights: list[tuple[Sample, dict[str, float]]] = ray.get([light for light, _ in results])
        stores = [segment for _, segment in results]
        if self._config.transport_kind == "colocate_store":
            keys = ray.get(stores)
            stores = [a.send_segment.remote(k) for a, k in zip(self.actors, keys, strict=False)]
            ray.wait(stores, num_returns=len(stores), fetch_local=False)
        transfer_s = time.perf_counter() - begin
        seconds = {key: max(s[key] for _, s in lights) for key in lights[0][1]} | {"transfer_s": transfer_s}
        trees = []
        for (sample, _), store in zip(lights, stores, strict=True):
            named = sample.frontier.replace(segment=SegmentRef.of(store, len(sample.frontier)))
            trees.extend(sample.replace_frontier(named).split())
        return [Group(tree, seconds, len(trees)) for tree in trees]


def build_slabs(config: RunConfig, devices: Devices) -> tuple[TrainSlab, RolloutSlab, Callable[[], None]]:
    """Places and builds all workers. The third value ends them and gives their devices back."""
    placement = Slabs(config, devices)
    num_train, _ = config.slab_sizes()
    actor_class = ray.remote(Worker)
    actors = []
    for index in range(config.num_devices):
        trains = index < num_train
        generates = config.layout == "colocate" or not trains
        rank = index if trains else index - num_train
        options = placement.options(index)
        actors.append(actor_class.options(**options).remote(config, rank, trains=trains, generates=generates))
    trainers = actors[:num_train]
    rollouts = actors if config.layout == "colocate" else actors[num_train:]
    address = ray.get(trainers[0].open_store.remote(num_train)) if num_train > 1 else None
    ray.get([a.build.remote(address, num_train) for a in actors])

    def end() -> None:
        for actor in actors:
            ray.kill(actor)
        placement.release()

    return TrainSlab(trainers), RolloutSlab(rollouts, config), end


def _renamed(segment: SegmentRef, objects: list[Any]) -> SegmentRef:
    """Handles become positions in the argument list: Ray hands the objects themselves over beside the rows."""
    position = {handle: index for index, handle in enumerate(objects)}
    return SegmentRef(handles=tuple(position[h] for h in segment.handles), rows=segment.rows)
