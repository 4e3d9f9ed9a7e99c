# SPDX-License-Identifier: Apache-2.0
"""Several training ranks: equal collectives, and the gradient of one."""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import linear_stage as small
import pytest
import torch
import torch.distributed as dist
from test_stack import FULL, make_stack, record_gradient, same, weights

from unirl.parity import LayoutMismatch
from unirl.train.plan import Plan, plan_updates
from unirl.train.stack import TrainStack, merge_results
from unirl.types import Part

WORLD = 2


class ThreadedGroup:
    """Ranks as threads that meet in `sum_`: all must make the same sums in the same order, or a barrier breaks."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.shared: list[torch.Tensor | None] = [None] * world_size


@dataclasses.dataclass
class ThreadedRank:
    group: ThreadedGroup
    rank: int
    world_size: int
    num_sums: int = 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        self.group.shared[self.rank] = tensor
        self.group.barrier.wait()
        total = sum(t.clone() for t in self.group.shared)
        self.group.barrier.wait()
        tensor.copy_(total)
        self.group.barrier.wait()
        return tensor


def uneven_batch() -> tuple[Part, Plan]:
    """Six rows of which one costs as much as the other five: 1 micro on one rank, 5 on the other."""
    part = small.batch(
        small.LinearStage(small.LinearPolicy()), num_groups=2, siblings=3, canvases=((2, 2), (1, 4))
    )
    plan = plan_updates(part.group_ids, part.canvases(), [5.0, *[1.0] * 5], WORLD, 1, 1)
    return part, plan


def build(collective: Any, **sections: Any) -> TrainStack:
    return make_stack(collective=collective, optim={"lr": 1e-2, "ema": {"decay": 0.9}}, **sections)


def run_rank(part: Part, plan: Plan, stack: TrainStack) -> dict[str, Any]:
    found = record_gradient(stack)
    view = plan.for_rank(stack.collective.rank)
    result = stack.train(part.select(view.rows), view)
    return {
        "gradient": found[0],
        "weights": weights(stack),
        "result": result,
        "micros": len(view.updates[0].micros),
    }


def on_threads(work: Any, **sections: Any) -> list[Any]:
    """What `work(stack)` gives or raises on each rank. The stacks are built one by one: each seeds the process's random state."""
    group = ThreadedGroup(WORLD)
    ranks = [ThreadedRank(group, i, WORLD) for i in range(WORLD)]
    stacks = [build(rank, **sections) for rank in ranks]
    results: list[Any] = [None] * WORLD

    def one(number: int) -> None:
        try:
            results[number] = work(stacks[number])
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({rank.num_sums for rank in ranks}) == 1
    return results


def alone(part: Part) -> dict[str, Any]:
    plan = plan_updates(part.group_ids, part.canvases(), [1.0] * len(part), 1, 1, 64)
    return run_rank(part, plan, build(small.SoloCollective()))


def test_ranks_with_five_and_one_micros_sum_equally_often_and_give_the_gradient_of_one_rank():
    part, plan = uneven_batch()
    real = [sum(bool(m) for m in plan.for_rank(r).updates[0].micros) for r in range(WORLD)]
    assert sorted(real) == [1, 5]
    results = on_threads(lambda stack: run_rank(part, plan, stack))
    assert [r["micros"] for r in results] == [5, 5]
    one = alone(part)
    for result in results:
        torch.testing.assert_close(result["gradient"], one["gradient"], rtol=1e-5, atol=1e-7)
    assert same(results[0]["weights"], results[1]["weights"])
    merged, single = merge_results([r["result"] for r in results]), merge_results([one["result"]])
    for name in ("loss", "ratio", "clip", "rows/trained", "train/steps", "train/skipped_steps", "gn"):
        assert merged[name] == pytest.approx(single[name], rel=1e-5, abs=1e-7), name


def test_mismatch_on_one_rank_stops_all_of_them_before_the_step():
    part, plan = uneven_batch()
    wrong = part.fingerprints.clone()
    wrong[0] += 1
    results = on_threads(lambda stack: run_rank(part.replace(fingerprints=wrong), plan, stack))
    assert all(isinstance(r, LayoutMismatch) for r in results)
    assert sorted(r.ids for r in results) == [(), ("r0.p0/0",)]


@pytest.mark.parametrize("source", ["rollout", "replay"])
def test_rank_without_a_live_row_takes_part_in_the_sums_and_in_the_step(source):
    part, _ = uneven_batch()
    part = part.replace(weights=torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    plan = plan_updates(
        part.group_ids, part.canvases(), [1.0] * 6, WORLD, 1, 2, weights=part.weights.tolist()
    )
    assert sorted(len(plan.for_rank(r).rows) for r in range(WORLD)) == [0, 1]

    def work(stack: TrainStack) -> dict[str, Any]:
        rows = part if plan.for_rank(stack.collective.rank).rows else part.replace(segment=None)
        return run_rank(rows, plan, stack)

    results = on_threads(work, old_logp_source=source)
    assert same(results[0]["weights"], results[1]["weights"])
    assert not same(results[0]["weights"], weights(make_stack()))
    assert merge_results([r["result"] for r in results])["rows/trained"] == 1


def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all():
    part, plan = uneven_batch()
    advantages = part.advantages.clone()
    advantages[0] = float("nan")
    start = weights(make_stack())
    results = on_threads(lambda stack: run_rank(part.replace(advantages=advantages), plan, stack))
    assert all(same(r["weights"], start) for r in results)
    assert merge_results([r["result"] for r in results])["train/skipped_steps"] == 1


class _Gloo:
    def __init__(self, rank: int, store: str) -> None:
        self.rank, self.world_size = rank, WORLD
        timeout = datetime.timedelta(seconds=60)
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD, timeout=timeout
        )

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor


def _process(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    part, plan = uneven_batch()
    found = run_rank(part, plan, build(_Gloo(rank, store)))
    torch.save({"gradient": found["gradient"], "weights": found["weights"]}, out)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_over_gloo_give_the_gradient_of_one(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    outs = [str(tmp_path / f"out{rank}") for rank in range(WORLD)]
    processes = [
        context.Process(target=_process, args=(rank, str(tmp_path / "store"), outs[rank]))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    results = [torch.load(out, weights_only=True) for out in outs]
    part, _ = uneven_batch()
    one = alone(part)
    for result in results:
        torch.testing.assert_close(result["gradient"], one["gradient"], rtol=1e-5, atol=1e-7)
    assert same(results[0]["weights"], results[1]["weights"])


def test_full_weights_of_both_ranks_stay_equal():
    part = small.batch(small.LinearStage(small.LinearPolicy()), canvases=((2, 2), (2, 4)))
    plan = plan_updates(
        part.group_ids, part.canvases(), [float(c.tokens(1)) for c in part.canvases()], WORLD, 2, 2
    )

    def work(stack: TrainStack) -> dict[str, torch.Tensor]:
        view = plan.for_rank(stack.collective.rank)
        stack.train(part.select(view.rows), view)
        return weights(stack)

    first, second = on_threads(work, model=FULL)
    assert same(first, second) and not same(first, weights(make_stack(model=FULL)))
