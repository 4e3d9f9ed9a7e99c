# SPDX-License-Identifier: Apache-2.0
"""Stealing on GPUs: a BAGEL of random weights a GPU, and the 512 / 768 / 1024 mix on an adverse placement.

    python benchmarks/bench_schedule_gpu.py                              # all GPUs of this machine, within 90 s on two H200
    python benchmarks/bench_schedule_gpu.py --layers 8 --repeats 1       # a quicker look
    python benchmarks/bench_schedule_gpu.py --device cpu --ranks 2 --tiny  # the whole path without a GPU

One process a GPU with the real stage, micro loop and plan; the coordinator serves them from this process. First each GPU
measures a sweep, and the cost model is fitted to the first one's. Then `steal` by adaptive units, `owner` and `steal` by whole
groups run in turn, as often as `--repeats` and `--budget-s` allow; the first turn is always made. The time that counts is from
the first rank's start to the last one's end; the target is at most 1.05 of the mean busy time. Beside it stands what the
simulator makes of the same plan with the fitted model. Rows are written to `results/schedule_gpu.jsonl` as they come, the calls
of every schedule's last turn to `results/schedule_gpu_trace.json`, and drawn to `schedule_gpu.png` there. Needs no Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _bench import RESULTS, print_table, write_rows
from _models import random_stage
from _ranks import Ranks, started

PROMPT = "a photo of a lighthouse on a rock in the evening, long exposure"
LONG_PROMPT = " ".join([PROMPT] * 8)
EXPECTED_TFLOPS = 550.0
"""What an estimate supposes that a GPU does."""


class Size(NamedTuple):
    """A model and three canvases for it, by their sides in pixels."""

    preset: str
    sides: tuple[int, int, int]


FULL = Size("bagel-7b-mot", (512, 768, 1024))
TINY = Size("bagel-digits", (8, 12, 16))


class Shape(NamedTuple):
    """One call of the engine."""

    side: int
    steps: int
    rows: int
    prompt: str


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
        if self.stage.model.device.type == "cuda":
            torch.cuda.synchronize()
        return request.replace_frontier(rows)


def main() -> None:
    import torch

    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="processes (default: one a GPU)")
    parser.add_argument("--tiny", action="store_true", help="the digits model on 8 / 12 / 16 pixels instead")
    parser.add_argument("--layers", type=int, help="fewer than the model's own")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="siblings a group")
    parser.add_argument("--groups", type=int, default=4, help="groups a rank")
    parser.add_argument("--repeats", type=int, default=3, help="turns at most")
    parser.add_argument("--budget-s", type=float, default=90.0, help="no turn begins that would end later")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for rows and trace")
    arguments = parser.parse_args()
    num_ranks = arguments.ranks or torch.cuda.device_count()
    if arguments.device == "cuda" and not 2 <= num_ranks <= torch.cuda.device_count():
        raise SystemExit(
            f"this benchmark needs 2 ranks or more and a GPU for each; asked for {num_ranks}, and there are "
            f"{torch.cuda.device_count()} GPUs; --device cpu --ranks 2 --tiny runs without"
        )
    if num_ranks < 2:
        raise SystemExit(f"--ranks is {num_ranks}; allowed: 2 or more")
    say = _clock(began)
    estimate(arguments, num_ranks, say)
    with started(num_ranks, serve, arguments.device, size_of(arguments), arguments.layers) as ranks:
        ranks.ask("hello")
        say(f"{num_ranks} models are built")
        run(arguments, ranks, num_ranks, began, say)


def run(
    arguments: argparse.Namespace,
    ranks: Ranks,
    num_ranks: int,
    began: float,
    say: Callable[[str], None],
) -> None:
    from unirl.report.timeline import draw_timelines
    from unirl.schedule.cost import TokenCount
    from unirl.schedule.fit import fit_cost
    from unirl.schedule.plan import RolloutPlan
    from unirl.schedule.timeline import CallTimeline, chrome_trace

    shapes = sweep_shapes(arguments)
    sweeps = ranks.ask("sweep", shapes)  # on all, so that all are warm
    say(f"swept {len(shapes)} shapes")
    size, layers = size_of(arguments), layers_of(arguments)
    common = {"ranks": num_ranks, "preset": size.preset, "layers": layers}
    measured = [
        {
            "part": "sweep",
            **shape._asdict(),
            "prompt": len(shape.prompt),
            "rank_seconds": [points[index].seconds for points in sweeps],
            "tflops": tflop(size, layers, shape) / sweeps[0][index].seconds,
            **common,
        }
        for index, shape in enumerate(shapes)
    ]
    header = ["side", "steps", "rows", "prompt", "rank_seconds", "tflops"]
    print_table(header, [[_text(row[h]) for h in header] for row in measured])
    write_rows("schedule_gpu", measured, arguments.out)
    report = fit_cost(sweeps[0])
    print(report.summary())
    say(f"cost: {json.dumps(report.model.to_config())}")
    groups = placement(num_ranks, arguments)
    model = report.model
    variants = {
        "steal, adaptive units": RolloutPlan(
            groups, num_ranks, "steal", model, arguments.rows, packs_groups=True
        ),
        "owner": RolloutPlan(groups, num_ranks, "owner", model, arguments.rows),
        "steal, whole groups": RolloutPlan(groups, num_ranks, "steal", TokenCount(), arguments.rows),
    }
    simulations = {name: simulated_timeline(plan, model, size) for name, plan in variants.items()}
    last: dict[str, CallTimeline] = {}
    rows: list[dict[str, Any]] = []
    for turn in range(arguments.repeats):
        turn_began = time.monotonic()
        for name, plan in variants.items():
            last[name] = timeline = ranks.rollout(plan, arguments.steps)
            simulated = simulations[name]
            rows.append(
                {
                    "part": "rollout",
                    "schedule": name,
                    "turn": turn,
                    "makespan_s": timeline.makespan,
                    "over_ideal": timeline.tail_ratio,
                    "busy_s": timeline.busy,
                    "calls": len(timeline.calls),
                    "stolen": timeline.num_stolen_units,
                    "simulated_makespan_s": simulated.makespan,
                    "simulated_over_ideal": simulated.tail_ratio,
                    "steps": arguments.steps,
                    "rows": arguments.rows,
                    "fit_r_squared": report.r_squared,
                    "fit_worst_error": report.worst_error,
                    **common,
                }
            )
            write_rows("schedule_gpu", rows[-1:], arguments.out)
            trace = chrome_trace(list(last.items()))
            (arguments.out / "schedule_gpu_trace.json").write_text(json.dumps(trace))
            say(f"turn {turn}, {name}: {timeline.makespan:.3f} s, {timeline.tail_ratio:.3f} of the ideal")
        turn_s = time.monotonic() - turn_began
        if time.monotonic() - began + turn_s > arguments.budget_s:
            say(f"another turn of {turn_s:.0f} s would not fit into --budget-s {arguments.budget_s:g}")
            break
    header = ["makespan_s", "over_ideal", "simulated_makespan_s", "simulated_over_ideal", "calls", "stolen"]
    medians = [
        [name, *(_text(statistics.median(row[h] for row in rows if row["schedule"] == name)) for h in header)]
        for name in variants
    ]
    print_table(["schedule", *header], medians)
    shown = [name for name in variants if name != "steal, whole groups"]
    pairs = [*((n, last[n]) for n in shown), *((f"{n}, simulated", simulations[n]) for n in shown)]
    draw_timelines(pairs, arguments.out / "schedule_gpu.png", unit="s")


def simulated_timeline(plan: Any, model: Any, size: Size) -> Any:
    """The plan on ranks that take exactly what the model says, canvases named as a run names them."""
    from unirl.schedule.simulate import simulate_plan

    names = {workload_of(size, Shape(side, 1, 1, "")).tokens: f"{side}x{side}" for side in size.sides}
    timeline = simulate_plan(plan, model)
    calls = tuple(c._replace(canvas=names[int(c.canvas.split()[0])]) for c in timeline.calls)
    return dataclasses.replace(timeline, calls=calls)


def placement(num_ranks: int, arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The first rank has two groups at the largest canvas and the rest at the next; the others have the smallest alone."""
    from unirl.schedule.units import Group

    small, middle, large = size_of(arguments).sides
    groups = []
    for rank in range(num_ranks):
        for index in range(arguments.groups):
            side = (large if index < 2 else middle) if rank == 0 else small
            name = f"r0.p{len(groups)}"
            ids = tuple(f"{name}/{row}" for row in range(arguments.rows))
            workload = workload_of(size_of(arguments), Shape(side, arguments.steps, 1, PROMPT))
            groups.append(Group(name, ids, workload, rank))
    return tuple(groups)


# ---- sizes and estimates


def size_of(arguments: argparse.Namespace) -> Size:
    return TINY if arguments.tiny else FULL


def layers_of(arguments: argparse.Namespace) -> int:
    from unirl.models.bagel import preset

    return arguments.layers or preset(size_of(arguments).preset).language.num_hidden_layers


def sweep_shapes(arguments: argparse.Namespace) -> list[Shape]:
    """Canvases, rows and steps crossed, and a long prompt: what tells the terms of the model apart."""
    sides = size_of(arguments).sides
    steps = sorted({max(1, arguments.steps // 2), max(2, arguments.steps)})
    crossed = [Shape(side, s, rows, PROMPT) for side in sides for rows in (1, 3) for s in steps]
    return crossed + [Shape(side, steps[-1], 1, LONG_PROMPT) for side in sides]


SWEEP_CALLS = 3
"""Of each shape; the first, which compiles and allocates, does not count."""


def workload_of(size: Size, shape: Shape) -> Any:
    from unirl.models.bagel import preset
    from unirl.schedule.units import Workload

    tokens = (shape.side // preset(size.preset).pixel_stride) ** 2
    return Workload(tokens, shape.steps, 1, len(shape.prompt) + 2)  # a byte a token, bos and eos


def tflop(size: Size, layers: int, shape: Shape) -> float:
    """Of one call's denoising: the linear layers that a latent token goes through, and its attention."""
    from unirl.models.bagel import preset

    language = preset(size.preset).language
    work = workload_of(size, shape)
    width, heads = language.hidden_size, language.num_key_value_heads * language.head_dim
    weights = 2 * width * width + 2 * width * heads + 3 * width * language.intermediate_size
    a_token = 2 * weights + 4 * width * (work.tokens + 2 + work.prefix_tokens)
    return layers * a_token * work.tokens * shape.rows * shape.steps / 1e12


def estimate(arguments: argparse.Namespace, num_ranks: int, say: Callable[[str], None]) -> None:
    """Says what each phase will take, where a GPU does `EXPECTED_TFLOPS`."""
    size, layers = size_of(arguments), layers_of(arguments)
    swept = sum(tflop(size, layers, shape) for shape in sweep_shapes(arguments)) * SWEEP_CALLS
    owned = [0.0] * num_ranks
    for group in placement(num_ranks, arguments):
        side = round(group.workload.tokens**0.5)
        side *= size.sides[0] // round(workload_of(size, Shape(size.sides[0], 1, 1, "")).tokens ** 0.5)
        owned[group.owner] += tflop(size, layers, Shape(side, arguments.steps, arguments.rows, PROMPT))
    ideal = sum(owned) / num_ranks
    say(
        f"expected at {EXPECTED_TFLOPS:g} TFLOP/s: sweep {swept / EXPECTED_TFLOPS:.1f} s; a turn "
        f"{(max(owned) + 2 * ideal) / EXPECTED_TFLOPS:.1f} s (owner {max(owned) / EXPECTED_TFLOPS:.1f}, ideal "
        f"{ideal / EXPECTED_TFLOPS:.1f}); {size.preset}, {layers} layers"
    )


# ---- a rank


def serve(rank: int, pipe: Any, coordinators: Any, device: str, size: Size, layers: int | None) -> None:
    """Answers requests of the main process until it says `end`."""
    import torch

    from unirl.reward.stack import RewardStack

    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    stack = RewardStack(Engine(random_stage(size.preset, device, layers)), {}, micro_batch_size=1)
    while (message := pipe.recv())[0] != "end":
        kind, *rest = message
        if kind == "sweep":
            pipe.send(sweep(stack, size, *rest))
        elif kind == "share":
            plan, begin, steps = rest
            stride = stack.engine.stage.pixel_stride
            groups = [(g.row_ids, round(g.workload.tokens**0.5) * stride, PROMPT) for g in plan.groups]
            request = request_of(size, groups, steps)
            time.sleep(max(0.0, begin - time.time()))
            done = stack.run_share(request, plan, rank, coordinators if plan.needs_coordinator else None)
            pipe.send((done.calls, done.num_stolen_units))
        else:
            pipe.send(kind)


def sweep(stack: Any, size: Size, shapes: Sequence[Shape]) -> list[Any]:
    """Median seconds of each shape, as measurements; turns go round all shapes, so that a clock that drifts does so for all."""
    from unirl.schedule.fit import Measurement

    requests = [
        request_of(size, [(tuple(f"r1.p0/{row}" for row in range(s.rows)), s.side, s.prompt)], s.steps)
        for s in shapes
    ]
    times: list[list[float]] = [[] for _ in shapes]
    for _ in range(SWEEP_CALLS):
        for request, of_shape in zip(requests, times, strict=True):
            begin = time.perf_counter()
            stack.engine.generate(request)
            of_shape.append(time.perf_counter() - begin)
    return [
        Measurement(workload_of(size, shape), shape.rows, statistics.median(of_shape[1:]))
        for shape, of_shape in zip(shapes, times, strict=True)
    ]


def request_of(size: Size, groups: Sequence[tuple[tuple[str, ...], int, str]], steps: int) -> Any:
    """Rows of given ids, side and prompt."""
    import torch

    from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

    params = SamplingParams(
        height=max(size.sides),
        width=max(size.sides),
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


def _clock(began: float) -> Callable[[str], None]:
    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {text}", flush=True)

    return say


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
