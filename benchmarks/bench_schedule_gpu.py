# SPDX-License-Identifier: Apache-2.0
"""Stealing on GPUs: a BAGEL of random weights a GPU, and the 512 / 768 / 1024 mix on an adverse placement.

    python benchmarks/bench_schedule_gpu.py                      # all GPUs of this machine
    python benchmarks/bench_schedule_gpu.py --layers 8 --steps 4 # a quicker look

One process a GPU with the real stage, micro loop and plan; the coordinator serves them from this process. First each GPU
measures a sweep, and the cost model is fitted to the first one's. Then `owner`, `steal` by whole groups and `steal` by adaptive
units run in turn. The time that counts is from the first rank's start to the last one's end; the target is at most 1.05 of the mean
busy time. Needs no Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from _bench import print_table, write_rows

SIDES = (512, 768, 1024)
PROMPT = "a photo of a lighthouse on a rock in the evening, long exposure"


class Coordinators:
    """The pure coordinator of the current round, where all processes reach it, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def open(self, plan: Any) -> None:
        from unirl.schedule.cost import RankCorrection

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


class Engine:
    """The stage as an engine that decodes no images: what is scheduled here is denoising."""

    name = "bench"
    noise_keyed_by_row = True
    min_pack_rows = 1
    packs_groups = True

    def __init__(self, stage: Any) -> None:
        self.stage = stage

    def check(self, part: Any) -> None:
        return None

    def generate(self, request: Any) -> Any:
        import torch

        with torch.no_grad():
            rows = self.stage.sample(request.frontier, decode=False)
        torch.cuda.synchronize()
        return request.replace_frontier(rows)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="fewer than the 7B model's 28")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="siblings a group")
    parser.add_argument("--groups", type=int, default=4, help="groups a rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="trace file of the last round of each schedule")
    arguments = parser.parse_args()
    num_ranks = torch.cuda.device_count()
    if num_ranks < 2:
        raise SystemExit(f"this benchmark needs 2 GPUs or more; there are {num_ranks}")
    context = multiprocessing.get_context("spawn")
    with Manager(ctx=context) as manager:
        coordinators = manager.Coordinators()
        ranks = []
        for rank in range(num_ranks):
            here, there = context.Pipe()
            context.Process(
                target=serve, args=(rank, there, coordinators, arguments.layers), daemon=True
            ).start()
            ranks.append(here)
        _all(ranks, ("hello",))
        rows = run(arguments, ranks, coordinators)
        for pipe in ranks:
            pipe.send(("end",))
    header = ["schedule", "makespan_s", "over_ideal", "idle_s", "calls", "stolen"]
    print_table(header, [[_text(row[h]) for h in header] for row in rows])
    write_rows("schedule_gpu", rows)


def run(arguments: argparse.Namespace, ranks: Sequence[Any], coordinators: Any) -> list[dict[str, Any]]:
    from unirl.schedule.cost import TokenCount
    from unirl.schedule.fit import fit_cost
    from unirl.schedule.plan import RolloutPlan
    from unirl.schedule.timeline import CallTimeline, chrome_trace

    shapes = [
        (side, steps, count, prompt)
        for side in SIDES
        for steps in (2, arguments.steps)
        for count in sorted({1, arguments.rows})
        for prompt in (PROMPT, " ".join([PROMPT] * 8))
    ]
    sweeps = _all(ranks, ("sweep", shapes))  # on all, so that all are warm
    report = fit_cost(sweeps[0])
    print(report.summary(), flush=True)
    print("cost:", json.dumps(report.model.to_config()), flush=True)
    groups = placement(len(ranks), arguments)
    variants = {
        "owner": RolloutPlan(groups, len(ranks), "owner", report.model, arguments.rows),
        "steal, whole groups": RolloutPlan(groups, len(ranks), "steal", TokenCount(), arguments.rows),
        "steal, adaptive units": RolloutPlan(
            groups, len(ranks), "steal", report.model, arguments.rows, packs_groups=True
        ),
    }
    timelines: dict[str, list[CallTimeline]] = {name: [] for name in variants}
    for _ in range(arguments.repeats):
        for name, plan in variants.items():
            coordinators.open(plan)
            begin = time.time() + 0.2  # all start together
            done = _all(ranks, ("share", plan, arguments.steps, begin))
            calls = tuple(call for of_rank, _ in done for call in of_rank)
            timelines[name].append(CallTimeline(calls, len(ranks), sum(stolen for _, stolen in done)))
    if arguments.trace is not None:
        arguments.trace.write_text(json.dumps(chrome_trace([(n, t[-1]) for n, t in timelines.items()])))
    return [
        {
            "schedule": name,
            "gpus": len(ranks),
            "layers": arguments.layers,
            "steps": arguments.steps,
            "rows": arguments.rows,
            "makespan_s": statistics.median(t.makespan for t in found),
            "over_ideal": statistics.median(t.tail_ratio for t in found),
            "idle_s": statistics.median(sum(t.idle) / len(ranks) for t in found),
            "calls": statistics.median(len(t.calls) for t in found),
            "stolen": statistics.median(t.num_stolen_units for t in found),
            "fit_r_squared": report.r_squared,
            "fit_worst_error": report.worst_error,
        }
        for name, found in timelines.items()
    ]


def placement(num_ranks: int, arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The first rank has two groups at 1024 and the rest at 768; the others have 512 alone."""
    from unirl.schedule.units import Group, Workload

    groups = []
    for rank in range(num_ranks):
        for index in range(arguments.groups):
            side = (1024 if index < 2 else 768) if rank == 0 else 512
            name = f"r0.p{len(groups)}"
            ids = tuple(f"{name}/{row}" for row in range(arguments.rows))
            groups.append(
                Group(name, ids, Workload((side // 16) ** 2, arguments.steps, 1, len(PROMPT) + 2), rank)
            )
    return tuple(groups)


# ---- a rank


def serve(rank: int, pipe: Any, coordinators: Any, layers: int | None) -> None:
    """Answers requests of the main process until it says `end`."""
    import torch

    from unirl.reward.stack import RewardStack

    torch.cuda.set_device(rank)
    stack = RewardStack(Engine(build_stage(layers)), {}, micro_batch_size=1)
    while (message := pipe.recv())[0] != "end":
        kind, *rest = message
        if kind == "sweep":
            pipe.send(sweep(stack, *rest))
        elif kind == "share":
            plan, steps, begin = rest
            request = request_of(
                [(g.row_ids, round(g.workload.tokens**0.5) * 16, PROMPT) for g in plan.groups], steps
            )
            time.sleep(max(0.0, begin - time.time()))
            done = stack.run_share(request, plan, rank, coordinators if plan.needs_coordinator else None)
            pipe.send((done.calls, done.num_stolen_units))
        else:
            pipe.send(kind)


def sweep(stack: Any, shapes: Sequence[tuple[int, int, int, str]]) -> list[Any]:
    """Median seconds of each shape, as measurements."""
    from unirl.schedule.fit import Measurement
    from unirl.schedule.units import Workload

    points = []
    for side, steps, count, prompt in shapes:
        ids = tuple(f"r1.p0/{row}" for row in range(count))
        request = request_of([(ids, side, prompt)], steps)
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            stack.engine.generate(request)
            times.append(time.perf_counter() - begin)
        workload = Workload((side // 16) ** 2, steps, 1, len(prompt) + 2)  # a byte a token, bos and eos
        points.append(Measurement(workload, count, statistics.median(times[1:])))
    return points


def request_of(groups: Sequence[tuple[tuple[str, ...], int, str]], steps: int) -> Any:
    """Rows of given ids, side and prompt."""
    import torch

    from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

    params = SamplingParams(
        height=max(SIDES),
        width=max(SIDES),
        num_inference_steps=steps,
        eta=0.7,
        rule="flow",
        noise=NoiseRecipe(0),
        trajectory_dtype="bfloat16",
    )
    rows = [(row_id, side, prompt) for ids, side, prompt in groups for row_id in ids]
    return Sample(
        (
            Part(
                ids=tuple(row_id for row_id, _, _ in rows),
                prompts=tuple(prompt for _, _, prompt in rows),
                metadata=tuple({"canvas": [side, side]} for _, side, _ in rows),
                sde_steps=torch.zeros((len(rows), 1), dtype=torch.int64),
                params=params,
            ),
        )
    )


def build_stage(layers: int | None) -> Any:
    """A BAGEL of the public dimensions with random weights, in bfloat16 on this process's GPU."""
    import torch

    from unirl.models.bagel import Bagel, BagelStage, preset
    from unirl.models.bagel.tokenizer import ByteTokenizer

    config = preset("bagel-7b-mot")
    if layers is not None:
        config = config.replace(language=dataclasses.replace(config.language, num_hidden_layers=layers))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Bagel(config).eval().requires_grad_(False).to(torch.bfloat16)
    for name, weight in model.named_parameters():  # on the GPU: on the host it would take minutes
        if "pos_embed" not in name:
            torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else weight.fill_("norm" in name)
    return BagelStage(model, codec=None, tokenizer=ByteTokenizer())


def _all(ranks: Sequence[Any], message: tuple[Any, ...]) -> list[Any]:
    """Asks every rank and waits for all answers."""
    for pipe in ranks:
        pipe.send(message)
    return [pipe.recv() for pipe in ranks]


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
