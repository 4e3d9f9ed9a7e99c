# SPDX-License-Identifier: Apache-2.0
"""Long-tail scheduling: what the simulator says, what the coordinator serves, and what a mixed digits run gains.

    python benchmarks/bench_schedule.py simulator coordinator digits overlap train

`simulator`: the 512 / 768 / 1024 example, random placements, a thousand ranks. `coordinator`: pulls a second, pure and through
Ray from many callers, beside an actor that does nothing. `digits`: two ranks on a placement that gives one of them all large
canvases, without a schedule and under each, with token count and with coefficients fitted on this machine. `overlap`:
scoring beside generation, with scorers of growing cost. `train`: seconds of the slower training rank over the mean, rows dealt by
number and by cost.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _runs import ROOT, metrics, record, table, train

from unirl.schedule.coordinator import AdaptivePacking
from unirl.schedule.cost import TokenCount
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.policies import StealPolicy
from unirl.schedule.simulate import EXAMPLE_MIX, compare_schedules, parse_mix, simulate
from unirl.schedule.timeline import read_trace
from unirl.schedule.units import Group, Workload, build_unit_table

Row = dict[str, Any]
WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {
        "simulator": simulator,
        "coordinator": coordinator,
        "digits": digits,
        "overlap": overlap,
        "train": training,
    }
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--rollouts", type=int, default=8, help="of each run, the first left out")
    parser.add_argument("--repeats", type=int, default=3, help="of each run, variants in turn")
    parser.add_argument("--callers", type=int, default=64, help="that pull through Ray at once")
    arguments = parser.parse_args()
    for name in arguments.parts or parts:
        rows = parts[name](arguments)
        header = list(dict.fromkeys(key for row in rows for key in row))
        print(
            f"\n== {name}\n{table(header, [[_text(row.get(h, '')) for h in header] for row in rows])}",
            flush=True,
        )
        record("schedule", [{"part": name, **row} for row in rows])


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# ---- the simulator


def simulator(arguments: argparse.Namespace) -> list[Row]:
    groups, num_ranks = parse_mix(EXAMPLE_MIX, rows_a_group=16)
    unit = 16 * 1024
    rows: list[Row] = [
        {
            "case": f"example, {name}",
            "makespan": t.makespan / unit,
            "over ideal": t.tail_ratio,
            "calls": len(t.spans),
        }
        for name, _, t in compare_schedules(groups, num_ranks, TokenCount())
    ]
    ratios = []
    owners = [group.owner for group in groups]
    for seed in range(2000):
        random.Random(seed).shuffle(owners)
        placed = [Group(g.group_id, g.row_ids, g.workload, o) for g, o in zip(groups, owners, strict=True)]
        units = build_unit_table(placed, TokenCount(), max_rows=16, min_rows=1)
        ratios.append(simulate(units, num_ranks, StealPolicy(), packing=AdaptivePacking(16)).tail_ratio)
    rows.append({"case": "2000 random placements, adaptive: mean", "over ideal": statistics.fmean(ratios)})
    rows.append({"case": "2000 random placements, adaptive: worst", "over ideal": max(ratios)})
    choose = random.Random(0)
    many = [
        Group(
            f"g{i}",
            tuple(f"g{i}/{r}" for r in range(10)),
            Workload(choose.choice([1024, 2304, 4096])),
            i // 10,
        )
        for i in range(10_000)
    ]
    units = build_unit_table(many, TokenCount(), max_rows=1)
    begin = time.perf_counter()
    timeline = simulate(units, 1000, StealPolicy())
    seconds = time.perf_counter() - begin
    rows.append({"case": "1000 ranks, 100000 units", "over ideal": timeline.tail_ratio, "seconds": seconds})
    return rows


# ---- the coordinator


def coordinator(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for num_ranks in (8, 64, 1000):
        best = 0.0
        for _ in range(5):
            pure = _many(num_ranks, 48_000 // num_ranks).coordinator()
            begin, pulls = time.perf_counter(), 0
            while (assignment := pure.pull(pulls % num_ranks)) is not None:
                pure.done(assignment.lease)
                pulls += 1
            best = max(best, pulls / (time.perf_counter() - begin))
        rows.append({"case": f"pure, {num_ranks} ranks", "pulls a second": best})
    return rows + _through_ray(arguments.callers, arguments.repeats)


def _many(num_ranks: int, units_a_rank: int) -> RolloutPlan:
    groups = tuple(
        Group(f"g{i}", tuple(f"g{i}/{r}" for r in range(units_a_rank)), Workload(16), i)
        for i in range(num_ranks)
    )
    return RolloutPlan(groups, num_ranks, "steal", TokenCount(), max_rows=1)


def _through_ray(num_callers: int, repeats: int) -> list[Row]:
    """The coordinator and an actor that does nothing, in turn, from the same callers: a busy machine slows both."""
    import ray

    from unirl.distributed.coordinator import start_coordinator

    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    class Nothing:
        def call(self, a: int, b: int, c: int, d: float) -> tuple[bool, int]:
            return True, a

    class Caller:  # without our imports beyond the pure ones: 64 processes of a tensor library would not fit
        def pull_all(self, actor: Any, rank: int) -> int:
            from unirl.distributed.coordinator import RemoteUnits

            units = RemoteUnits(actor, 0)
            count, assignment = 0, units.pull(rank)
            while assignment is not None:
                count += 1
                _, assignment = units.done_and_pull(rank, assignment.lease, 0.001)
            return count

        def call_often(self, actor: Any, rank: int, times: int) -> int:
            for _ in range(times):
                ray.get(actor.call.remote(0, rank, 1, 0.001))
            return times

    each = 60
    actor, nothing = start_coordinator(), ray.remote(num_cpus=0)(Nothing).remote()
    callers = [ray.remote(num_cpus=0)(Caller).remote() for _ in range(num_callers)]
    ray.get([caller.__ray_ready__.remote() for caller in [*callers, nothing]])
    rates: dict[str, list[float]] = {"bare actor": [], "coordinator": []}
    for turn in range(repeats + 1):
        for name in random.Random(turn).sample(list(rates), 2):
            ray.get(actor.open.remote(0, _many(num_callers, each)))
            begin = time.perf_counter()
            if name == "coordinator":
                counts = ray.get([c.pull_all.remote(actor, rank) for rank, c in enumerate(callers)])
            else:
                counts = ray.get([c.call_often.remote(nothing, rank, each) for rank, c in enumerate(callers)])
            if turn:  # in the first, callers meet the actors
                rates[name].append(sum(counts) / (time.perf_counter() - begin))
    ray.shutdown()
    over = [c / b for c, b in zip(rates["coordinator"], rates["bare actor"], strict=True)]
    return [
        {"case": f"through Ray, {num_callers} callers, {name}", "pulls a second": statistics.median(found)}
        for name, found in rates.items()
    ] + [{"case": "coordinator over bare actor", "ratio": statistics.median(over)}]


# ---- real runs on two processes


def digits(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cost = _fitted_cost(work)
        adverse = _adverse_rows(work / "adverse.jsonl")
        variants = {
            "no schedule": (),
            "owner": ("reward_stack.schedule=owner",),
            "ring": ("reward_stack.schedule=ring",),
            "steal, token count": ("reward_stack.schedule=steal",),
            "steal, fitted cost": ("reward_stack.schedule=steal", f"reward_stack.cost={cost}"),
        }
        runs = _runs(arguments, work, adverse, variants)
    rows = [{"schedule": name, **_of_generation(found)} for name, found in runs.items()]
    for row in rows:
        row["wall over owner"] = row["makespan_s"] / rows[1]["makespan_s"]
    return rows


def overlap(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        adverse = _adverse_rows(work / "adverse.jsonl")
        scorers = {
            "the recipe's scorers": (),
            "the judge as well": (
                "reward.scorers=[{name: digit_probability}, {name: digit_judge, weight: 0.0}, "
                "{name: jpeg_compressibility, weight: 0.0}]",
            ),
        }
        for scoring, chosen in scorers.items():
            variants = {
                f"{schedule or 'no schedule'}, overlap {value}": (
                    *chosen,
                    *([f"reward_stack.schedule={schedule}"] if schedule else []),
                    f"reward_stack.overlap={value}",
                )
                for schedule in ("", "owner", "steal")
                for value in ("false", "true")
            }
            runs = _runs(arguments, work, adverse, variants)
            rows += [{"scoring": scoring, "variant": name, **_of_generation(r)} for name, r in runs.items()]
    return rows


def training(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cost = _fitted_cost(work)
        adverse = _adverse_rows(work / "adverse.jsonl")
        variants = {
            "dealt by number": ("reward_stack.cost={c: 1.0}",),  # every row costs the same
            "dealt by token count": (),
            "dealt by fitted cost": (f"reward_stack.cost={cost}",),
        }
        runs = _runs(
            arguments, work, adverse, {k: (*v, "stack.micro_batch_size=12") for k, v in variants.items()}
        )
    return [
        {
            "shards": name,
            "slowest over mean": statistics.median(line["perf/train_tail_ratio"] for line in lines),
            "slowest_s": statistics.median(line["perf/train_busy_s"] for line in lines),
            "train_s": statistics.median(line["perf/train_s"] for line in lines),
        }
        for name, lines in runs.items()
    ]


def _runs(
    arguments: argparse.Namespace, work: Path, data: Path, variants: dict[str, tuple[str, ...]]
) -> dict[str, list[Row]]:
    """Lines of the rollouts after the first of every variant's runs, with the generation's makespan of each."""
    lines: dict[str, list[Row]] = {name: [] for name in variants}
    common = (
        f"num_rollouts={arguments.rollouts}",
        "num_devices=2",
        "samples_per_prompt=48",  # a rank's share has to be many calls long, or there is nothing to hand over
        "reward_stack.micro_batch_size=48",
        "sampling.height=12",
        "sampling.width=12",
        f"data.train={{name: null, path: {data}, shuffle: false}}",
        "~data.eval",
    )
    for _ in range(arguments.repeats):
        for name, overrides in variants.items():
            run_dir, _ = train("digits_sync", *common, *overrides, asynchronous=False, folder=work)
            for step, row in metrics(run_dir).items():
                if step >= WARM_UP and "reward" in row:
                    trace = json.loads((run_dir / "timeline" / f"rollout_{step:06d}.json").read_text())
                    makespan = read_trace(trace)[0][1].makespan
                    lines[name].append({**row, "makespan_s": makespan})
    return lines


def _of_generation(lines: list[Row]) -> Row:
    return {
        "makespan_s": statistics.median(line["makespan_s"] for line in lines),
        "over ideal": statistics.median(line["perf/tail_ratio"] for line in lines),
        "idle_s": statistics.median(line["perf/idle_s"] for line in lines),
        "calls": statistics.median(line["schedule/calls"] for line in lines),
        "stolen": statistics.median(line["schedule/stolen_units"] for line in lines),
        "rollouts": len(lines),
    }


def _adverse_rows(path: Path) -> Path:
    """Ten prompts, the five of the first rank all on the largest canvas."""
    from unirl import digits as words

    with path.open("w") as file:
        for digit in range(10):
            side = 12 if digit < 5 else 8
            row = {
                "prompt": words.prompt(digit, words.PHRASINGS[0]),
                "metadata": {"digit": digit, "canvas": [side, side]},
            }
            file.write(json.dumps(row) + "\n")
    return path


def _fitted_cost(work: Path) -> Path:
    path = work / "cost.json"
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "unirl.cli",
            "fit-cost",
            "--config-name",
            "diffusion/digits/digits_mixed",
        ]
        done = subprocess.run(
            [*command, "--out", str(path)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        print(done.stdout, flush=True)
    return path


if __name__ == "__main__":
    main()
