# SPDX-License-Identifier: Apache-2.0
"""`unirl simulate`: what each schedule does with a mix of canvases. `unirl fit-cost`: the cost model of this machine."""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from unirl.schedule.cost import cost_from_config
from unirl.schedule.simulate import EXAMPLE_MIX, compare_schedules, parse_mix
from unirl.schedule.timeline import chrome_trace
from unirl.schedule.units import Group, Workload, contiguous_owners


def add_commands(commands: Any) -> None:
    """Adds both commands' parsers."""
    _add_simulate(commands)
    _add_fit_cost(commands)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="makespans of a mix of canvases under each schedule",
        description="Runs the schedules on a mix of canvases without generating anything.",
    )
    parser.add_argument(
        "--mix",
        default=EXAMPLE_MIX,
        help="canvases (a side or HxW) of each rank's groups, ranks separated by ';', '3*' repeats a rank (default: %(default)s)",
    )
    parser.add_argument(
        "--dataset", help="a built-in set, .txt or .jsonl file, dealt out contiguously, instead"
    )
    parser.add_argument("--num-ranks", type=int, default=8, help="with --dataset (default %(default)s)")
    parser.add_argument("--prompts", type=int, help="with --dataset: its first rows (default: all)")
    parser.add_argument(
        "--canvas",
        type=int,
        nargs=2,
        default=(512, 512),
        metavar=("HEIGHT", "WIDTH"),
        help="with --dataset: of rows that name none (default 512 512)",
    )
    parser.add_argument(
        "--samples-per-prompt", type=int, default=16, help="rows a group (default %(default)s)"
    )
    parser.add_argument(
        "--pixel-stride", type=int, default=16, help="pixels a token, a side (default %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=1, help="denoising steps, for --cost (default %(default)s)"
    )
    parser.add_argument("--cost", help="a JSON file of `unirl fit-cost` (default: cost is token count)")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="deal the same groups out at random")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the schedules")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for chrome://tracing or Perfetto"
    )
    parser.set_defaults(command=run_simulate)


def _add_fit_cost(commands: Any) -> None:
    parser = commands.add_parser(
        "fit-cost",
        help="measure what calls of the engine cost here and fit reward_stack.cost",
        description="Runs the recipe's engine over canvases, steps, rows, prompts and source images, and fits the cost model.",
    )
    parser.add_argument(
        "--config-name", required=True, help="recipe, for example diffusion/digits/digits_mixed"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    parser.add_argument(
        "--canvases", nargs="+", metavar="HxW", help="default: the bound, 3/4 and 1/2 of its sides"
    )
    parser.add_argument("--steps", type=int, nargs="+", default=(), help="default: 2 6")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=(), help="default: 1, half a micro-batch, a whole one"
    )
    parser.add_argument("--sources", type=int, nargs="+", default=(), help="sides of source images, 0: none")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls a shape (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("cost.json"), help="file for reward_stack.cost (default %(default)s)"
    )
    parser.set_defaults(command=run_fit_cost)


def run_simulate(options: argparse.Namespace) -> int:
    """Prints makespan, idle share and stolen units of every schedule, and draws them where that is asked for."""
    from unirl.report.timeline import draw_timelines

    groups, num_ranks = _groups(options)
    cost = cost_from_config(options.cost)
    affine = [cost.affine(group.workload) for group in groups]
    unit = min(a * len(g.row_ids) + b for g, (a, b) in zip(groups, affine, strict=True))
    outcomes = compare_schedules(groups, num_ranks, cost)
    print(
        f"{len(groups)} groups of {options.samples_per_prompt} rows on {num_ranks} ranks; times in units of the cheapest group"
    )
    print(f"{'schedule':<24}{'makespan':>10}{'/ ideal':>9}{'idle':>8}{'calls':>8}{'stolen':>8}")
    for name, _, timeline in outcomes:
        print(
            f"{name:<24}{timeline.makespan / unit:>10.4g}{timeline.tail_ratio:>9.3f}{timeline.idle_share:>8.1%}"
            f"{len(timeline.spans):>8}{timeline.num_stolen_units:>8}"
        )
    print(f"{'ideal':<24}{outcomes[0][2].ideal / unit:>10.4g}")
    named = []
    for name, table, timeline in outcomes:
        spans = tuple(s._replace(start=s.start / unit, end=s.end / unit) for s in timeline.spans)
        named.append((name, replace(timeline, spans=spans, ideal=timeline.ideal / unit).calls(table)))
    if options.trace is not None:
        options.trace.write_text(json.dumps(chrome_trace(named)))
        print(f"trace: {options.trace}")
    if options.png is not None:
        drawn = [
            pair for pair in named if pair[0] in ("owner", "steal, whole groups", "steal, adaptive units")
        ]
        print(f"picture: {draw_timelines(drawn, options.png, unit='cheapest groups')}")
    return 0


def run_fit_cost(options: argparse.Namespace) -> int:
    """Measures, fits, prints residuals and writes the coefficients."""
    import torch

    from unirl.config import RunConfig, parse
    from unirl.distributed.sweep import measure, plan_sweep
    from unirl.schedule.fit import fit_cost
    from unirl.types import Canvas

    config = parse(RunConfig, _recipe(options))
    torch.set_num_threads(config.threads_per_worker)
    canvases = [Canvas(*_sides(text)) for text in options.canvases or ()]
    plan = plan_sweep(
        config, canvases=canvases, steps=options.steps, rows=options.rows, sources=options.sources
    )
    shapes = (*plan.fitted, *plan.held_out)

    def told(done: int, total: int) -> None:
        print(f"\r{done}/{total} calls", end="" if done < total else "\n", file=sys.stderr, flush=True)

    points = measure(config, shapes, repeats=options.repeats, told=told)
    fitted, held_out = points[: len(plan.fitted)], points[len(plan.fitted) :]
    report = fit_cost(fitted, held_out=held_out, source_images=any(shape.source for shape in shapes))
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{config.threads_per_worker} CPU thread(s)"
    )
    print(f"{len(fitted)} shapes fitted and {len(held_out)} held out, {config.model.preset} on {device}")
    print(report.summary())
    held = {
        "coefficients": report.model.to_config(),
        "measured": {
            "device": device,
            "model": config.model.preset,
            "dtype": config.model.dtype,
            "shapes": len(fitted),
            "r_squared": report.r_squared,
            "worst_error": report.worst_error,
            "held_out_error": report.held_out_error,
            "token_count_error": report.token_count_error,
        },
    }
    options.out.write_text(json.dumps(held, indent=2) + "\n")
    for name, value in report.model.to_config().items():
        print(f"  {name} = {value:.4g}")
    print(f"written to {options.out}; in the recipe: reward_stack: {{cost: {options.out}}}")
    return 0


def _recipe(options: argparse.Namespace) -> Any:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from unirl.entry import read_recipe

    try:
        return read_recipe(["--config-name", options.config_name, *options.overrides])
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"recipe {options.config_name!r}: {error}") from error


def _sides(text: str) -> tuple[int, int]:
    try:
        sides = [int(side) for side in text.split("x")]
        if not 1 <= len(sides) <= 2:
            raise ValueError("more than two sides")
    except ValueError as error:
        raise ValueError(f"--canvases has {text!r} ({error}); allowed: a side or HxW, in pixels") from error
    return sides[0], sides[-1]


def _groups(options: argparse.Namespace) -> tuple[list[Group], int]:
    for name in ("samples_per_prompt", "pixel_stride", "num_ranks", "steps"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; allowed: 1 or more")
    if options.dataset is None:
        groups, num_ranks = parse_mix(
            options.mix, rows_a_group=options.samples_per_prompt, pixel_stride=options.pixel_stride
        )
    else:
        num_ranks = options.num_ranks
        groups = _dataset_groups(options)
    if options.shuffle is not None:
        owners = [group.owner for group in groups]
        random.Random(options.shuffle).shuffle(owners)
        groups = [replace(group, owner=owner) for group, owner in zip(groups, owners, strict=True)]
    return [replace(g, workload=replace(g.workload, steps=options.steps)) for g in groups], num_ranks


def _dataset_groups(options: argparse.Namespace) -> list[Group]:
    from unirl.config import DatasetConfig
    from unirl.data import BUILT_IN, load_dataset
    from unirl.types import Canvas

    named = options.dataset in BUILT_IN
    dataset = load_dataset(DatasetConfig(**{"name" if named else "path": options.dataset}), "--dataset")
    rows = [dataset[index] for index in range(min(len(dataset), options.prompts or len(dataset)))]
    stride = options.pixel_stride
    groups = []
    for index, (row, owner) in enumerate(
        zip(rows, contiguous_owners(len(rows), options.num_ranks), strict=True)
    ):
        where = f"{dataset.name}, row {index + 1}"
        canvas = Canvas.parse(row.metadata.get("canvas") or list(options.canvas), where)
        if canvas.height % stride or canvas.width % stride:
            raise ValueError(
                f"{where}: canvas {canvas.height}x{canvas.width} is no multiple of {stride} pixels; set --pixel-stride"
            )
        ids = tuple(f"p{index}/{row}" for row in range(options.samples_per_prompt))
        groups.append(Group(f"p{index}", ids, Workload(canvas.tokens(stride)), owner))
    return groups
