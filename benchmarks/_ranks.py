# SPDX-License-Identifier: Apache-2.0
"""Rollout ranks as plain processes, and the pure coordinator that serves them; no Ray, no trainer."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.managers import BaseManager
from typing import Any

from unirl.schedule.cost import RankCorrection
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.timeline import CallTimeline

START_S = 0.2
"""From the request of a rollout to its start, so that all ranks start together."""


class Coordinators:
    """The coordinator of the current rollout, where all processes reach it, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def open(self, plan: RolloutPlan) -> None:
        self._coordinator = plan.coordinator(RankCorrection(plan.num_ranks))

    def pull(self, rank: int) -> Any:
        with self._lock:
            return self._coordinator.pull(rank)

    def done_and_pull(self, rank: int, lease: int, seconds: float | None) -> Any:
        with self._lock:
            return self._coordinator.done_and_pull(rank, lease, seconds)


class Manager(BaseManager):
    pass


Manager.register("Coordinators", Coordinators)


class Ranks:
    """Processes that answer messages. `rollout` asks for a share by (`"share"`, plan, begin, ...)."""

    def __init__(self, pipes: Sequence[Any], coordinators: Any) -> None:
        self._pipes = pipes
        self._coordinators = coordinators

    def ask(self, *message: Any) -> list[Any]:
        """Asks every rank and waits for all answers."""
        for pipe in self._pipes:
            pipe.send(message)
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise SystemExit(f"rank {rank} died; what it said stands above") from None
        return answers

    def rollout(self, plan: RolloutPlan, *more: Any) -> CallTimeline:
        """Runs a plan; ranks answer with their calls and how many units they stole."""
        self._coordinators.open(plan)
        done = self.ask("share", plan, time.time() + START_S, *more)
        calls = tuple(call for of_rank, _ in done for call in of_rank)
        return CallTimeline(calls, plan.num_ranks, sum(stolen for _, stolen in done))


@contextlib.contextmanager
def started(num_ranks: int, serve: Callable[..., None], *arguments: Any) -> Iterator[Ranks]:
    """Runs `serve(rank, pipe, coordinators, *arguments)` in a process a rank, until it is sent `("end",)`."""
    context = multiprocessing.get_context("spawn")
    with Manager(ctx=context) as manager:
        coordinators = manager.Coordinators()
        pipes = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            context.Process(target=serve, args=(rank, there, coordinators, *arguments), daemon=True).start()
            there.close()  # so that a rank that dies is an end of file here
            pipes.append(here)
        yield Ranks(pipes, coordinators)
        for pipe in pipes:
            pipe.send(("end",))
