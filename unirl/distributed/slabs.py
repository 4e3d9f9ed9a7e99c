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
from unirl.distributed.payload import pack_segment
from unirl.distributed.scheduled import DoneShare, ScheduledDispatcher
from unirl.distributed.supervisor import Supervisor
from unirl.distributed.workloads import RowCosts
from unirl.protocols import Dispatcher, WeightPush
from unirl.reward.stack import ScoredRows
from unirl.rollout.async_runtime import RayGenerationDispatcher
from unirl.rollout.dispatch import contiguous_shares
from unirl.schedule.restore import restore_order
from unirl.schedule.shards import balanced_shards
from unirl.schedule.timeline import CallTimeline
from unirl.train.plan import Plan
from unirl.train.stack import TrainResult
from unirl.types import Part, Sample, SegmentRef


@dataclasses.dataclass(frozen=True)
class Group:
    """A finished group of siblings: light rows here, trajectories in a store.

    `seconds` and `timeline` are those of the whole generation that the group came from, and `num_groups` the groups that share
    them; a group out of a checkpoint has no timeline.
    """

    sample: Sample
    seconds: dict[str, float]
    num_groups: int
    timeline: CallTimeline | None = None

    @property
    def group_id(self) -> str:
        return self.sample.parts[0].ids[0]

    @property
    def push_version(self) -> int:
        assert self.sample.frontier.push_version is not None
        return int(self.sample.frontier.push_version[0])


class TrainSlab:
    """Rank 0 speaks for the slab where one answer is enough; trainable weights are equal on all ranks."""

    def __init__(self, actors: Sequence[Any], supervisor: Supervisor) -> None:
        self.actors = list(actors)
        self._ray = supervisor
        self._writing: Any = None

    def train(self, rows: Part, plan: Plan) -> list[TrainResult]:
        """One training step. `plan` says which rows each rank replays, and in which micro-batches."""
        refs = []
        for rank, actor in enumerate(self.actors):
            local_plan = plan.for_rank(rank)
            share = rows.select(local_plan.rows)
            objects = share.segment.objects()
            named = share.replace(segment=_renamed(share.segment, objects))
            refs.append(actor.train.remote(named, local_plan, list(range(len(objects))), *objects))
        return self._ray.get(refs)

    def store_rollout(self, root: Path, number: int, rows: Part) -> None:
        """Rank 0 writes all rows, before they are trained on, and the weights that generated them."""
        objects = rows.segment.objects()
        named = rows.replace(segment=_renamed(rows.segment, objects), media=None)
        places = list(range(len(objects)))
        self._ray.get(self.actors[0].store_rollout.remote(str(root), number, named, places, *objects))

    def build_push(self, push_version: int, *, average: bool = False) -> Any:
        """A reference to the weights of rank 0 as they go over the wire."""
        return self.actors[0].build_push.remote(push_version, average)

    def keep_pushed(self, push_version: int) -> None:
        """Keeps the current adapter as that of a version: rows generated under it may have to be replayed under it."""
        self._ray.get([a.keep_pushed.remote(push_version) for a in self.actors])

    def swap_average(self) -> None:
        """Exchanges live and averaged weights in place; a second call undoes the first, bit for bit."""
        self._ray.get([a.swap_average.remote() for a in self.actors])

    def save(self, root: Path, number: int, trainer: Any, buffered: Sequence[Group]) -> None:
        """Writes a checkpoint from rank 0: weights and optimizer, the trainer's counts, groups that are not trained yet.

        With `checkpoint.background` it returns when all is copied; `written` says how the writing went.
        """
        objects = list(dict.fromkeys(h for g in buffered for h in g.sample.frontier.segment.objects()))
        lights = []
        for group in buffered:
            rows = group.sample.frontier
            named = rows.replace(segment=_renamed(rows.segment, objects), media=None)
            lights.append(group.sample.replace_frontier(named))
        places = list(range(len(objects)))
        self._ray.get(self.actors[0].save.remote(str(root), number, trainer, lights, places, *objects))
        self._writing = self.actors[0].written.remote()

    def written(self, *, wait: bool) -> bool:
        """Whether the last checkpoint is on disk, waiting for it if asked to. Raises, once, what writing it raised."""
        if self._writing is None:
            return True
        if not wait and not self._ray.wait([self._writing], timeout=0)[0]:
            return False
        writing, self._writing = self._writing, None
        self._ray.get(writing)
        return True

    def restore(self, path: Path) -> tuple[Any, list[Group]]:
        """All ranks take up a checkpoint; its counts, and its groups with their trajectories back in the store."""
        counts, samples = self._ray.get([a.restore.remote(str(path)) for a in self.actors])[0]
        groups = []
        for sample in samples:
            rows = sample.frontier
            stored = SegmentRef.of(ray.put(pack_segment(rows.segment)), len(rows))
            groups.append(Group(sample.replace_frontier(rows.replace(segment=stored)), {}, 1))
        return counts, groups

    def export_adapter(self, folder: str, *, average: bool) -> None:
        self._ray.get(self.actors[0].export_adapter.remote(folder, average))


class RolloutSlab:
    """Generation, evaluation and pushes. `dispatcher` serves the async runtime and the sync trainers alike.

    Under a schedule a worker that dies while it generates leaves `actors`, and its work goes to the others.
    """

    def __init__(self, actors: Sequence[Any], config: RunConfig, supervisor: Supervisor) -> None:
        self.actors = list(actors)
        self._ray = supervisor
        self._num_ranks = len(self.actors)
        self._config = config
        self._newest: tuple[Any, tuple[int, int]] | None = None
        self.dispatcher: Dispatcher
        if config.reward_stack.schedule is None:
            self.dispatcher = RayGenerationDispatcher(self.actors, ray=supervisor, collect_fn=self._collect)
        else:
            self.dispatcher = ScheduledDispatcher(
                self.actors, ray=supervisor, plan_fn=RowCosts(config).plan, collect_fn=self._collect_scheduled
            )

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
        return Sample.concat(self._ray.get(refs))

    def load(self, push: Any) -> None:
        """Sends a push (a reference to a `WeightPush`) to every rank and compares digests of what is live there."""
        loading = [a.load.remote(push) for a in self.actors]  # they start as soon as the push is built
        sent: WeightPush = self._ray.get(push)
        if self._config.max_worker_restarts:
            self._newest = push, sent.digest
        digests = self._ray.get(loading)
        wrong = [rank for rank, digest in enumerate(digests) if tuple(digest) != tuple(sent.digest)]
        if wrong:
            raise RuntimeError(
                f"push {sent.push_version} did not land on rollout ranks {wrong}: sent digest {sent.digest}, live digests "
                f"{[digests[r] for r in wrong]}"
            )

    def reload(self, ask: Callable[..., Any]) -> None:
        """Gives a worker that was started again what the others hold, by `ask(method, *arguments)`, and compares digests."""
        if self._newest is None:
            return
        push, digest = self._newest
        if tuple(live := ask("load", push)) != tuple(digest):
            raise RuntimeError(f"a restarted worker holds weights of digest {live}; sent digest {digest}")

    def spare(self, actor: Any, asked: Sequence[str]) -> bool:
        """Takes a dead worker out, if others are left and none of what it was asked for is the work of it alone."""
        if actor not in self.actors or len(self.actors) == 1 or set(asked) - {"generate"}:
            return False
        self.actors.remove(actor)
        return True

    def sleep(self) -> None:
        self._ray.get([a.sleep.remote() for a in self.actors])

    def wake(self) -> None:
        self._ray.get([a.wake.remote() for a in self.actors])

    def _collect(self, results: list[tuple[Any, Any]]) -> list[Group]:
        """Contiguous shares: each worker returns its part of the request, complete and in order."""
        lights: list[ScoredRows] = self._ray.get([light for light, _ in results])
        shares = [
            DoneShare(actor, rows, store)
            for actor, rows, (_, store) in zip(self.actors, lights, results, strict=False)
        ]
        trees = [rows.sample for rows in lights if rows.sample is not None]
        request = Sample.concat(trees)
        groups = self._collect_scheduled(request, shares)
        self._ray.forget([light for light, _ in results])
        return groups

    def _collect_scheduled(self, request: Sample, shares: Sequence[DoneShare]) -> list[Group]:
        """Rows from anywhere, in the request's order again, and verified to be exactly those that were asked for.

        Light rows come here; trajectories stay where they were published, or are fetched from the actor that kept them.
        """
        begin = time.perf_counter()
        shares = [share for share in shares if share.rows.sample is not None]
        stores = [share.store for share in shares]
        if self._config.transport_kind == "colocate_store":
            keys = self._ray.get(stores)
            stores = [s.actor.send_segment.remote(k) for s, k in zip(shares, keys, strict=True)]
            self._ray.wait(stores, num_returns=len(stores), fetch_local=False)
        parts = []
        for share, store in zip(shares, stores, strict=True):
            rows = share.rows.sample.frontier  # type: ignore[union-attr]
            # Another one, if its worker was started again.
            parts.append(rows.replace(segment=SegmentRef.of(self._ray.current(store), len(rows))))
        rows = _restored(request, Part.concat(parts))
        transfer_s = time.perf_counter() - begin
        done = [share.rows for share in shares]
        if self._config.reward.dispatch == "balanced":
            rows, scored = self._score(rows)
            done += scored
        calls = tuple(call for rows_done in done for call in rows_done.calls)
        timeline = CallTimeline(calls, self._num_ranks, sum(d.num_stolen_units for d in done))
        seconds = {phase: max(d.seconds[phase] for d in done) for phase in done[0].seconds}
        seconds["transfer_s"] = transfer_s
        trees = request.replace_frontier(rows).split()
        self._ray.forget(stores)
        return [Group(tree, seconds, len(trees), timeline) for tree in trees]

    def _score(self, rows: Part) -> tuple[Part, list[ScoredRows]]:
        """Scores generated rows on all ranks alike, by the pixels they have, wherever they were generated."""
        pixels = [float(canvas.height * canvas.width) for canvas in rows.canvases()]
        images = rows.replace(segment=None)
        shares = balanced_shards(pixels, min(len(self.actors), len(rows)))
        refs = [
            actor.score.remote(images.select(share))
            for actor, share in zip(self.actors, shares, strict=False)
        ]
        done: list[ScoredRows] = self._ray.get(refs)
        request = Sample((images.replace(media=None),))
        scored = _restored(request, Part.concat([d.sample.frontier for d in done if d.sample is not None]))
        return scored.replace(segment=rows.segment), done


def _restored(request: Sample, rows: Part) -> Part:
    """`rows` in the order of the request's frontier. `ValueError` when they are not exactly the rows of that."""
    return rows.select(restore_order(request.frontier.ids, rows.ids))


def _renamed(segment: SegmentRef, objects: list[Any]) -> SegmentRef:
    """Handles become positions in the argument list: Ray hands the objects themselves over beside the rows."""
    position = {handle: index for index, handle in enumerate(objects)}
    return SegmentRef(handles=tuple(position[h] for h in segment.handles), rows=segment.rows)
