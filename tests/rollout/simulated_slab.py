# SPDX-License-Identifier: Apache-2.0
"""A discrete-event model of a rollout slab, and a trainer's loop over it, for the tests of the async runtime.

Time is a number that `wait` and `train` move forward. The slab runs generations one after another, as one set
of workers does, or on several lanes, so that short generations overtake long ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from unirl.rollout.async_runtime import AsyncRolloutScheduler


@dataclass(frozen=True)
class Prompts:
    """A request: group ids, each with its cost in seconds."""

    rows: tuple[tuple[str, float], ...]

    @property
    def group_id(self) -> str:
        ((group_id, _),) = self.rows
        return group_id

    def split(self) -> list[Prompts]:
        return [Prompts((row,)) for row in self.rows]

    @staticmethod
    def concat(requests: Sequence[Prompts]) -> Prompts:
        return Prompts(tuple(row for request in requests for row in request.rows))


@dataclass(frozen=True)
class Group:
    group_id: str
    push_version: int
    cost_s: float


@dataclass(eq=False)
class Handle:
    request: Prompts
    push_version: int
    starts_at_s: float
    ends_at_s: float
    failures_left: int
    collected: bool = False


@dataclass
class SimulatedSlab:
    """A `Dispatcher` over simulated time. `calls` is the log that the tests read."""

    rng: random.Random
    num_lanes: int = 1
    failure_rate: float = 0.0
    jitter: float = 0.9
    now_s: float = 0.0
    push_version: int = 0
    lanes: list[float] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lanes = [0.0] * self.num_lanes

    def launch(self, request: Prompts) -> Handle:
        self._maybe_fail("launch")
        lane = min(range(self.num_lanes), key=self.lanes.__getitem__)
        start = max(self.now_s, self.lanes[lane])
        duration = sum(cost for _, cost in request.rows) * self.rng.uniform(1 - self.jitter, 1 + self.jitter)
        self.lanes[lane] = start + duration
        failures = self.rng.choice([0, 0, 1, 2]) if self.rng.random() < self.failure_rate else 0
        handle = Handle(request, self.push_version, start, start + duration, failures)
        self.handles.append(handle)
        self.calls.append(("launch", tuple(group_id for group_id, _ in request.rows)))
        return handle

    def is_ready(self, handle: Handle) -> bool:
        self.calls.append(("is_ready",))
        return handle.ends_at_s <= self.now_s

    def wait(self, handle: Handle) -> None:
        self.now_s = max(self.now_s, handle.ends_at_s)

    def collect(self, handle: Handle) -> list[Group]:
        assert handle.ends_at_s <= self.now_s and not handle.collected
        if handle.failures_left:
            handle.failures_left -= 1
            self.calls.append(("failed", handle.request.rows[0][0]))
            raise OSError(f"transfer of {handle.request.rows[0][0]} failed")
        handle.collected = True
        self.calls.append(("collect", tuple(group_id for group_id, _ in handle.request.rows)))
        return [Group(group_id, handle.push_version, cost) for group_id, cost in handle.request.rows]

    @property
    def num_running(self) -> int:
        return sum(handle.ends_at_s > self.now_s for handle in self.handles)

    def push(self) -> None:
        assert self.num_running == 0, "weights were pushed into a running generation"
        self.push_version += 1
        self.calls.append(("push",))

    def _maybe_fail(self, what: str) -> None:
        if self.failure_rate and self.rng.random() < self.failure_rate / 4:
            raise OSError(f"{what} failed")


def prompt_stream(group_counts: Sequence[int], cost_s: Callable[[int], float]) -> Callable[[int], Prompts]:
    """A source whose request i holds `group_counts[i % len]` prompts; prompt n, over all, is "p<n>"."""

    def source(index: int) -> Prompts:
        whole, part = divmod(index, len(group_counts))
        first = whole * sum(group_counts) + sum(group_counts[:part])
        return Prompts(
            tuple((f"p{n}", cost_s(n)) for n in range(first, first + group_counts[index % len(group_counts)]))
        )

    return source


@dataclass
class Run:
    """What a trainer's loop saw: groups and their staleness in pushes, step by step."""

    steps: list[list[Group]] = field(default_factory=list)
    staleness: list[list[int]] = field(default_factory=list)
    num_errors: int = 0

    @property
    def trained_ids(self) -> list[str]:
        return [group.group_id for step in self.steps for group in step]


def retried(call: Callable[[], Any], run: Run) -> Any:
    while True:
        try:
            return call()
        except OSError:
            run.num_errors += 1


def train(
    scheduler: AsyncRolloutScheduler,
    slab: SimulatedSlab,
    *,
    rollouts: Iterable[int],
    train_s: float,
    extra_pushes: float = 0.0,
    run: Run | None = None,
    after_step: Callable[[int, list[Group]], None] = lambda rollout_id, groups: None,
) -> Run:
    """The loop of an async trainer. `extra_pushes` is the probability of a push that is not due."""
    run = run or Run()
    for rollout_id in rollouts:
        groups = retried(lambda rollout_id=rollout_id: scheduler.next_step(rollout_id), run)
        run.steps.append(groups)
        run.staleness.append([slab.push_version - group.push_version for group in groups])
        after_step(rollout_id, groups)
        slab.now_s += train_s * slab.rng.uniform(0.1, 1.9)
        due = (rollout_id + 1) % scheduler.weight_sync_interval == 0
        if due or slab.rng.random() < extra_pushes:
            retried(scheduler.drain, run)
            slab.push()
            scheduler.on_push()
    return run
