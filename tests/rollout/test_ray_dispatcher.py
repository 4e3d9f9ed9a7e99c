# SPDX-License-Identifier: Apache-2.0
"""The Ray dispatcher, on real actors of a local Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import simulated_slab
from simulated_slab import Group, Prompts

from unirl.rollout.async_runtime import AsyncRolloutScheduler, RayGenerationDispatcher, drained_at_exit
from unirl.rollout.dispatch import contiguous_shares

ray = pytest.importorskip("ray")


def test_contiguous_shares_cover_all_items_in_order_and_differ_by_at_most_one() -> None:
    assert contiguous_shares(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert contiguous_shares(2, 3) == [(0, 1), (1, 2), (2, 2)]
    for num_items in range(20):
        for num_shares in range(1, 6):
            shares = contiguous_shares(num_items, num_shares)
            assert [item for start, stop in shares for item in range(start, stop)] == list(range(num_items))
            sizes = [stop - start for start, stop in shares]
            assert max(sizes) - min(sizes) <= 1


def test_a_slab_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="train_fraction"):
        RayGenerationDispatcher([], ray=ray, collect_fn=list)


class Worker:
    """Takes a prompt's cost in seconds to generate it; its light rows name the version and worker."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.push_version = 0

    def generate(self, request: Prompts) -> tuple[list[tuple[str, int, float, int]], bytes]:
        time.sleep(sum(cost for _, cost in request.rows))
        if any(group_id == "bad" for group_id, _ in request.rows):
            raise ArithmeticError("not finite")
        if any(group_id == "fatal" for group_id, _ in request.rows):
            os._exit(1)
        light = [(group_id, self.push_version, cost, self.index) for group_id, cost in request.rows]
        return light, b"trajectories"

    def push(self) -> None:
        self.push_version += 1


@pytest.fixture
def workers(ray_cluster: None) -> Iterator[list[Any]]:
    # Actor processes cannot import test modules, so their classes travel by value.
    for module in (sys.modules[__name__], simulated_slab):
        ray.cloudpickle.register_pickle_by_value(module)
    actors = [ray.remote(num_cpus=0)(Worker).remote(index) for index in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def light_rows(pairs: list[Any]) -> list[list[tuple[str, int, float, int]]]:
    """What the driver fetches: the first result of each worker, never the second."""
    return ray.get([light for light, _ in pairs])


def groups_of(pairs: list[Any]) -> list[Group]:
    return [
        Group(group_id, version, cost) for part in light_rows(pairs) for group_id, version, cost, _ in part
    ]


@pytest.mark.slow
def test_a_generation_is_split_by_group_and_comes_back_in_worker_order(workers: list[Any]) -> None:
    dispatcher = RayGenerationDispatcher(workers, ray=ray, collect_fn=light_rows)
    handle = dispatcher.launch(Prompts((("a", 0.0), ("b", 0.0), ("c", 0.4))))
    dispatcher.wait(handle)
    assert dispatcher.is_ready(handle)
    assert dispatcher.collect(handle) == [[("a", 0, 0.0, 0), ("b", 0, 0.0, 0)], [("c", 0, 0.4, 1)]]
    alone = dispatcher.launch(Prompts((("d", 0.4),)))
    assert len(alone) == 1 and not dispatcher.is_ready(alone)
    assert dispatcher.collect(alone) == [[("d", 0, 0.4, 0)]]


@pytest.mark.slow
def test_a_workers_error_and_a_workers_death_come_out_of_collect(workers: list[Any]) -> None:
    dispatcher = RayGenerationDispatcher(workers, ray=ray, collect_fn=groups_of)
    bad = dispatcher.launch(Prompts((("a", 0.0), ("bad", 0.0))))
    dispatcher.wait(bad)
    with pytest.raises(ArithmeticError, match="not finite"):
        dispatcher.collect(bad)
    fatal = dispatcher.launch(Prompts((("a", 0.0), ("fatal", 0.0))))
    dispatcher.wait(fatal)
    with pytest.raises(ray.exceptions.RayActorError):
        dispatcher.collect(fatal)


@pytest.mark.slow
def test_generation_on_ray_overlaps_with_training(workers: list[Any]) -> None:
    """0.6 s of generation beside 0.6 s of training: six rollouts take far less than 6 * 1.2 s."""
    dispatcher = RayGenerationDispatcher(workers, ray=ray, collect_fn=groups_of)
    scheduler = AsyncRolloutScheduler(
        dispatcher,
        lambda index: Prompts(((f"r{index}.p0", 0.6), (f"r{index}.p1", 0.6))),
        groups_per_step=2,
        num_rollouts=6,
        weight_sync_interval=3,
        buffer_max_staleness=1,
        reap_before_launch=True,
    )
    started = time.monotonic()
    versions: list[int] = []
    with drained_at_exit(scheduler):
        for rollout_id in range(6):
            groups = scheduler.next_step(rollout_id)
            assert [group.group_id for group in groups] == [f"r{rollout_id}.p0", f"r{rollout_id}.p1"]
            versions += {group.push_version for group in groups}
            time.sleep(0.6)
            if rollout_id == 2:
                scheduler.drain()
                ray.get([worker.push.remote() for worker in workers])
                scheduler.on_push()
    assert versions == [0, 0, 0, 0, 1, 1]
    assert time.monotonic() - started < 6.2
