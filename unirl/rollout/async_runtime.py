# SPDX-License-Identifier: Apache-2.0
"""The asynchronous rollout runtime: generation runs beside training, with a bounded policy lag.

`AsyncRolloutScheduler` is the whole policy and is pure: it has no clock, no thread and no Ray. It sees the
rollout slab through a `Dispatcher`; `RayGenerationDispatcher` is the one for Ray actors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from unirl.rollout.buffer import BufferedGroup, BufferOrder, RolloutGroup, VersionedGroupBuffer
from unirl.rollout.dispatch import RayGenerationDispatcher, RolloutRequest
from unirl.rollout.prompt_queue import Piece, PromptQueue, from_plain, to_plain

if TYPE_CHECKING:  # the scheduler is pure: importing it loads no tensor library
    from unirl.protocols import Dispatcher

__all__ = [
    "AsyncRolloutScheduler",
    "AsyncStats",
    "RayGenerationDispatcher",
    "RolloutGroup",
    "RolloutRequest",
    "drained_at_exit",
]


@dataclass
class _Generation:
    """A launched generation: its number in launch order, its prompts, and the version of the weights."""

    number: int
    pieces: tuple[Piece, ...]
    version: int
    handle: Any = None

    @property
    def num_groups(self) -> int:
        return sum(len(piece.group_ids) for piece in self.pieces)


@dataclass(frozen=True)
class AsyncStats:
    """A snapshot. `staleness` is in pushes, one entry a group of the last step; the rest are counts.

    `num_evicted` counts groups dropped for age, `num_reissued` those of them launched again so far.
    """

    staleness: tuple[int, ...]
    version: int
    num_trained_groups: int
    num_buffered_groups: int
    num_inflight_groups: int
    num_inflight_generations: int
    num_launched_generations: int
    num_evicted: int
    num_reissued: int


@dataclass
class _Counts:
    """Everything countable that a resumed run must know."""

    version: int = 0
    trained: int = 0
    next_generation: int = 0
    evicted: int = 0
    reissued: int = 0
    staleness: list[int] = field(default_factory=list)


class AsyncRolloutScheduler:
    """Keeps generations in flight and hands out `groups_per_step` groups a training rollout.

    A *rollout* here is one training step's worth of groups, G = `groups_per_step`; a *generation* is one
    launch. Their sizes may differ. `source(index)` gives request number `index`: the same one whenever it is
    asked again, with ids unique in the run. The scheduler works through requests in order, whole where the
    ceiling allows and in part where it does not, so prompts are launched in the data's order and none beyond
    the ceiling.

    **A step** reaps finished generations, launches, and takes G groups; or launches first, the default, for
    callers that keep two in flight. With too few groups it waits for the oldest generation in flight and does
    the same again. With `reap_before_launch` and `max_inflight=1` every reap meets an idle rollout slab, and
    every step returns with the next generation already running, ceiling permitting: a transfer that the
    rollout worker executes itself never queues behind a generation. Launching first with one in flight is
    serial, by construction.

    **Staleness** of a group is the number of pushes between its generation and its training; it never exceeds
    s = `buffer_max_staleness`. Two things hold it there.

    1. *By force.* `on_push` evicts every buffered group that the new version makes too old. An evicted prompt
       is counted and issued again under its old ids, before anything new: slow prompts are not trained less
       often.
    2. *By plan*, so that the force is not needed. Let I = `weight_sync_interval`. At rollout r the version is
       w = r // I, and a launch requires

           trained + in flight + buffered + launched <= min(num_rollouts, (w + 1 + s) * I) * G  groups.

       Take a group launched at version w. All work in flight is drained before a push, so from version w + 1
       on it is in the buffer, or trained. At that push at most (w + 1 + s) * I * G groups are trained or
       buffered, all of them launched at version w or before. The order `oldest` takes each of those before
       any later launch, so the group is trained within the first (w + 1 + s) * I rollouts, that is at rollout
       r <= (w + 1 + s) * I - 1, whose version is r // I <= w + s. Hence staleness <= s, and nothing is ever
       evicted.

       `freshest` may overtake a group until the force evicts it; it lowers the mean staleness and pays in
       repeated generations. With s = 0 the ceiling stops at the window's end, the buffer is empty at each
       push, and neither order evicts; each window then starts cold.

    With `deterministic`, a reap depends on counts alone: it waits for the oldest generation, as often as the
    step needs groups, and never asks whether one is ready. The schedule is then a function of the
    configuration.

    **Errors.** A reap is complete or nothing. When collecting a generation fails, it stays in flight, the
    sweep goes on with the others, and the first error is raised afterwards, later ones attached as notes. The
    same step may then be asked for again.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        source: Callable[[int], RolloutRequest],
        *,
        groups_per_step: int,
        num_rollouts: int,
        max_inflight: int = 1,
        weight_sync_interval: int = 1,
        buffer_max_staleness: int = 0,
        buffer_order: BufferOrder = "oldest",
        reap_before_launch: bool = False,
        deterministic: bool = False,
    ) -> None:
        for key, value, least in (
            ("groups_per_step", groups_per_step, 1),
            ("num_rollouts", num_rollouts, 0),
            ("max_inflight", max_inflight, 1),
            ("weight_sync_interval", weight_sync_interval, 1),
            ("buffer_max_staleness", buffer_max_staleness, 0),
        ):
            if value < least:
                raise ValueError(f"{key} is {value}; it must be at least {least}")
        self.groups_per_step = groups_per_step
        self.num_rollouts = num_rollouts
        self.max_inflight = max_inflight
        self.weight_sync_interval = weight_sync_interval
        self.buffer_max_staleness = buffer_max_staleness
        self.reap_before_launch = reap_before_launch
        self.deterministic = deterministic
        self._dispatcher = dispatcher
        self._prompts = PromptQueue(source)
        self._buffer = VersionedGroupBuffer(buffer_order)
        self._inflight: list[_Generation] = []
        self._evicted_ids: set[str] = set()
        # Generations that a saved run had in flight; launched again, as they were, before anything else.
        self._interrupted: deque[_Generation] = deque()
        self._counts = _Counts()

    # ---- the loop

    def next_step(self, rollout_id: int) -> list[RolloutGroup]:
        """The groups to train in rollout `rollout_id`: exactly `groups_per_step`.

        `rollout_id` is the number of steps taken so far. Raises the first error of a reap, after which the
        same step may be asked for again.
        """
        if not 0 <= rollout_id < self.num_rollouts:
            raise ValueError(f"rollout {rollout_id} was asked for; num_rollouts is {self.num_rollouts}")
        steps_taken = self._counts.trained // self.groups_per_step
        if rollout_id != steps_taken:
            raise ValueError(f"rollout {rollout_id} was asked for; the next one in order is {steps_taken}")
        self._relaunch_interrupted()
        while True:
            if self.reap_before_launch:
                self._reap_finished()
                self._top_up(rollout_id)
            else:
                self._top_up(rollout_id)
                self._reap_finished()
            taken = self._buffer.take(self.groups_per_step)
            if taken is not None:
                return self._account_for(taken)
            assert self._inflight or self._room(rollout_id) > 0, "too few groups and no launch allowed"
            if self._inflight and not self.deterministic:  # a deterministic reap does its own waiting
                self._dispatcher.wait(self._inflight[0].handle)

    def drain(self, *, relaunch_interrupted: bool = True) -> None:
        """Waits for everything in flight and buffers it. Call before a push, an evaluation, a checkpoint.

        Generations that a loaded state had in flight are run first, so that the version they belong to is
        still the current one; a teardown has no use for them and passes `relaunch_interrupted=False`.
        """
        if relaunch_interrupted:
            self._relaunch_interrupted()
        errors: list[Exception] = []
        for generation in tuple(self._inflight):
            self._wait_and_reap(generation, errors)
        _raise_first(errors)

    def on_push(self) -> None:
        """Says that the rollout engine now holds newer weights. Nothing may be in flight: drain first."""
        assert not self._inflight and not self._interrupted, "weights were pushed under a running generation"
        self._counts.version += 1
        self._evict_stale()

    @property
    def stats(self) -> AsyncStats:
        counts = self._counts
        return AsyncStats(
            staleness=tuple(counts.staleness),
            version=counts.version,
            num_trained_groups=counts.trained,
            num_buffered_groups=len(self._buffer),
            num_inflight_groups=self._num_inflight_groups,
            num_inflight_generations=len(self._inflight),
            num_launched_generations=counts.next_generation,
            num_evicted=counts.evicted,
            num_reissued=counts.reissued,
        )

    # ---- launching

    @property
    def _num_inflight_groups(self) -> int:
        return sum(generation.num_groups for generation in (*self._inflight, *self._interrupted))

    def _room(self, rollout_id: int) -> int:
        """How many more groups the ceiling lets into the pipeline at this rollout."""
        window = rollout_id // self.weight_sync_interval
        ceiling = min(self.num_rollouts, (window + 1 + self.buffer_max_staleness) * self.weight_sync_interval)
        committed = self._counts.trained + self._num_inflight_groups + len(self._buffer)
        return ceiling * self.groups_per_step - committed

    def _top_up(self, rollout_id: int) -> None:
        while len(self._inflight) < self.max_inflight and (room := self._room(rollout_id)) > 0:
            self._launch_next(room)

    def _launch_next(self, room: int) -> None:
        pieces, request = self._prompts.take(room, self.groups_per_step)
        try:
            handle = self._dispatcher.launch(request)
        except BaseException:
            self._prompts.put_back(pieces)
            raise
        self._inflight.append(_Generation(self._counts.next_generation, pieces, self._counts.version, handle))
        self._counts.next_generation += 1
        again = self._evicted_ids.intersection(group_id for piece in pieces for group_id in piece.group_ids)
        self._evicted_ids -= again
        self._counts.reissued += len(again)

    def _relaunch_interrupted(self) -> None:
        while self._interrupted:
            generation = self._interrupted[0]
            generation.handle = self._dispatcher.launch(self._prompts.request_for(generation.pieces))
            self._inflight.append(self._interrupted.popleft())

    # ---- reaping

    def _reap_finished(self) -> None:
        errors: list[Exception] = []
        for generation in tuple(self._inflight):
            if self.deterministic:
                if len(self._buffer) >= self.groups_per_step:
                    break
                self._wait_and_reap(generation, errors)
            elif self._dispatcher.is_ready(generation.handle):
                self._wait_and_reap(generation, errors)
        _raise_first(errors)

    def _wait_and_reap(self, generation: _Generation, errors: list[Exception]) -> None:
        """Moves a generation to the buffer once it has ended, or leaves it in flight and notes the error."""
        try:
            self._dispatcher.wait(generation.handle)
            buffered = self._checked(generation, self._dispatcher.collect(generation.handle))
        except Exception as error:  # whatever the engine raised, the other generations are still good
            errors.append(error)
            return
        self._buffer.put_all(buffered)
        self._inflight.remove(generation)

    def _checked(self, generation: _Generation, groups: Sequence[RolloutGroup]) -> list[BufferedGroup]:
        """The groups of a generation with their origin, if they are the ones that were asked for."""
        origin = {group_id: piece.source_index for piece in generation.pieces for group_id in piece.group_ids}
        returned = [group.group_id for group in groups]
        if sorted(returned) != sorted(origin):
            raise RuntimeError(
                f"generation {generation.number} was asked for groups {sorted(origin)} and returned "
                f"{sorted(returned)}"
            )
        versions = {group.push_version for group in groups}
        if versions != {generation.version}:
            raise RuntimeError(
                f"generation {generation.number} was launched under weight version {generation.version}, but "
                f"its groups record {sorted(versions)}"
            )
        by_id = {group.group_id: group for group in groups}
        return [
            BufferedGroup(by_id[group_id], generation.version, generation.number, position, source_index)
            for position, (group_id, source_index) in enumerate(origin.items())
        ]

    def _account_for(self, taken: Sequence[BufferedGroup]) -> list[RolloutGroup]:
        self._counts.staleness = [self._counts.version - item.version for item in taken]
        assert max(self._counts.staleness) <= self.buffer_max_staleness, "a group outlived its bound"
        self._counts.trained += len(taken)
        return [item.group for item in taken]

    def _evict_stale(self) -> None:
        stale = self._buffer.evict_older_than(self._counts.version - self.buffer_max_staleness)
        self._prompts.put_back(
            Piece(source_index, tuple(item.group_id for item in items))
            for source_index, items in groupby(stale, key=lambda item: item.source_index)
        )
        self._evicted_ids.update(item.group_id for item in stale)
        self._counts.evicted += len(stale)

    # ---- saving

    def state_dict(self) -> tuple[dict[str, Any], list[RolloutGroup]]:
        """(counts, groups): JSON-able counts, and the buffered groups, in launch order.

        May be asked for between any two calls. What is in flight is saved as prompts and launched again after
        loading, with the same ids and under the same version, since nothing in flight ever crosses a push.
        """
        buffered = self._buffer.items
        counts = {
            "groups_per_step": self.groups_per_step,
            "counts": asdict(self._counts),
            "prompts": self._prompts.state_dict(),
            "evicted_ids": sorted(self._evicted_ids),
            "inflight": [
                [item.number, item.version, [to_plain(piece) for piece in item.pieces]]
                for item in (*self._inflight, *self._interrupted)
            ],
            "buffered": [
                [item.group_id, item.version, item.generation, item.position, item.source_index]
                for item in buffered
            ],
        }
        return counts, [item.group for item in buffered]

    def load_state_dict(self, counts: dict[str, Any], groups: Sequence[RolloutGroup]) -> None:
        """Takes up what `state_dict` gave. Only for a scheduler that has launched nothing yet."""
        assert self._counts == _Counts() and not self._inflight, "a state is loaded before the first step"
        if counts["groups_per_step"] != self.groups_per_step:
            raise ValueError(
                f"the saved run took {counts['groups_per_step']} groups a step and this one is asked for "
                f"{self.groups_per_step}; resume with the batch_size it was saved with"
            )
        described = [entry[0] for entry in counts["buffered"]]
        if described != [group.group_id for group in groups]:
            raise ValueError(
                f"the saved buffer holds groups {described}, but the groups given are "
                f"{[group.group_id for group in groups]}; the checkpoint's files do not belong together"
            )
        self._counts = _Counts(**counts["counts"])
        self._prompts.load_state_dict(counts["prompts"])
        self._evicted_ids = set(counts["evicted_ids"])
        self._interrupted = deque(
            _Generation(number, tuple(from_plain(piece) for piece in pieces), version)
            for number, version, pieces in counts["inflight"]
        )
        self._buffer.put_all(
            BufferedGroup(group, *entry[1:]) for group, entry in zip(groups, counts["buffered"], strict=True)
        )
        self._evict_stale()  # the bound may be tighter than the saved run's


def _raise_first(errors: Sequence[Exception]) -> None:
    if not errors:
        return
    for later in errors[1:]:
        errors[0].add_note(f"another generation failed in the same sweep: {type(later).__name__}: {later}")
    raise errors[0]


@contextmanager
def drained_at_exit(scheduler: AsyncRolloutScheduler) -> Iterator[AsyncRolloutScheduler]:
    """Drains on the way out, and lets the first exception through.

    When the body raised, that exception propagates and a failing drain is attached to it as a note. When the
    body ended well, a failing drain is the error and propagates.
    """
    try:
        yield scheduler
    except BaseException as error:
        try:
            scheduler.drain(relaunch_interrupted=False)
        except Exception as drain_error:  # it must not hide what went wrong first
            error.add_note(
                f"draining what was in flight failed too: {type(drain_error).__name__}: {drain_error}"
            )
        raise
    scheduler.drain(relaunch_interrupted=False)
