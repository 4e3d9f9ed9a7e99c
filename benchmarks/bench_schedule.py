# SPDX-License-Identifier: Apache-2.0
"""Long-tail scheduling: what the simulator says, what the coordinator serves, and what a mixed digits run gains.

    python benchmarks/bench_schedule.py simulator coordinator digits overlap train

`simulator`: the 512 / 768 / 1024 example, random placements, a thousand ranks. `coordinator`: pulls a second, pure and through
Ray from many callers, beside an actor that does nothing. `digits`: two ranks on a placement that gives one of them all large
canvases, without a schedule and under each, with token count and with coefficients fitted on this machine; the last rollouts are
drawn beside what the simulator makes of the same plan. `overlap`: scoring beside generation, with scorers that compute and with
one that waits. `train`: seconds of the slower training rank over the mean, rows dealt by number and by cost.

Ranks of real runs are bound to a core each (`pin_workers`), so two cores are needed, and nobody else on them.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

from _ranks import started
from _runs import IMAGES, RESULTS, ROOT, metrics, record, table, train

from unirl.config import RunConfig, ScorerConfig, parse
from unirl.distributed.workloads import RowCosts
from unirl.entry import read_recipe
from unirl.report.timeline import draw_timelines
from unirl.schedule.coordinator import AdaptivePacking
from unirl.schedule.cost import TokenCount
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.policies import StealPolicy
from unirl.schedule.simulate import EXAMPLE_MIX, compare_schedules, parse_mix, simulate, simulate_plan
from unirl.schedule.timeline import CallTimeline, chrome_trace, read_trace
from unirl.schedule.units import Group, Workload, build_unit_table
from unirl.trainer.requests import Requests

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
    parser.add_argument(
        "--rollouts",
        type=int,
        default=8,
        help="of each run, or of each case without a trainer; the first is left out",
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each run, variants in turn")
    parser.add_argument("--callers", type=int, default=64, help="that pull through Ray at once")
    parser.add_argument("--cost", type=Path, help="a file of `unirl fit-cost` (default: fitted here)")
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
        cost = _fitted_cost(arguments)
        adverse = _adverse_rows(work / "adverse.jsonl")
        variants = {
            "no schedule": (),
            "owner": ("reward_stack.schedule=owner",),
            "ring": ("reward_stack.schedule=ring",),
            "steal, token count": ("reward_stack.schedule=steal",),
            "steal, fitted cost": ("reward_stack.schedule=steal", f"reward_stack.cost={cost}"),
        }
        runs = _runs(arguments, work, adverse, variants)
        shown = {"owner": "owner", "steal, fitted cost": "steal"}
        pairs = [(name, runs[name][-1]["timeline"]) for name in shown]
        pairs += [
            (f"{name}, simulated", _simulated(adverse, cost, schedule)) for name, schedule in shown.items()
        ]
    (RESULTS / "schedule_digits_trace.json").write_text(json.dumps(chrome_trace(pairs)))
    draw_timelines(pairs, IMAGES / "schedule_digits.png", unit="s")
    rows = [{"schedule": name, **_of_generation(found)} for name, found in runs.items()]
    for row in rows:
        row["wall over owner"] = row["makespan_s"] / rows[1]["makespan_s"]
    return rows


def _simulated(data: Path, cost: Path, schedule: str) -> CallTimeline:
    """The run's plan on ranks that take exactly what the fitted model says, canvases named as a run names them."""
    config = _config(data, schedule, cost)
    costs = RowCosts(config)
    timeline = simulate_plan(costs.plan(Requests(config).training(0), 2), costs.cost)
    names = {f"{side * side // 4} tokens": f"{side}x{side}" for side in (8, 12)}
    return replace(timeline, calls=tuple(c._replace(canvas=names[c.canvas]) for c in timeline.calls))


# ---- scoring beside generation, on two processes without Ray


def overlap(arguments: argparse.Namespace) -> list[Row]:
    waiting = {
        f"one that waits {seconds} s a call": [
            ScorerConfig(name="digit_probability"),
            ScorerConfig(name="_scorers:Waiting", weight=0.0, options={"seconds": seconds}),
        ]
        for seconds in (0.05, 0.2)
    }
    scorers = {
        "the recipe's scorers": [ScorerConfig(name="digit_probability")],
        "the judge as well": [
            ScorerConfig(name="digit_probability"),
            ScorerConfig(name="digit_judge", weight=0.0),
            ScorerConfig(name="jpeg_compressibility", weight=0.0),
        ],
        **waiting,
    }
    found: dict[tuple[str, str, bool], list[CallTimeline]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cost, adverse = _fitted_cost(arguments), _adverse_rows(work / "adverse.jsonl")
        configs = {schedule: _config(adverse, schedule, cost) for schedule in ("owner", "steal")}
        request = Requests(configs["owner"]).training(0)
        plans = {schedule: RowCosts(config).plan(request, 2) for schedule, config in configs.items()}
        cases = [(s, n, o) for n in scorers for s in configs for o in (False, True)]
        with started(2, _serve, configs["owner"], scorers, request) as ranks:
            for turn in range(arguments.rollouts):
                for case in random.Random(turn).sample(cases, len(cases)):
                    schedule, name, beside = case
                    timeline = ranks.rollout(plans[schedule], name, beside)
                    if turn >= WARM_UP:
                        found.setdefault(case, []).append(timeline)
                print(f"overlap: turn {turn} of {arguments.rollouts}", flush=True)
    rows: list[Row] = []
    for case in cases:
        schedule, name, beside = case
        ratios = [
            t.makespan / without.makespan
            for t, without in zip(found[case], found[schedule, name, False], strict=True)
        ]
        rows.append(
            {
                "scoring": name,
                "schedule": schedule,
                "overlap": beside,
                "makespan_s": statistics.median(t.makespan for t in found[case]),
                "over ideal": statistics.median(t.tail_ratio for t in found[case]),
                "scoring_s": statistics.median(_scoring_s(t) for t in found[case]),
                "over without": statistics.median(ratios),
                "rollouts": len(found[case]),
            }
        )
    return rows


def _scoring_s(timeline: CallTimeline) -> float:
    """Seconds in which a rank scores, the mean over the ranks."""
    seconds = sum(call.end - call.start for call in timeline.calls if call.phase == "score")
    return seconds / timeline.num_ranks


def _serve(rank: int, pipe: Any, coordinators: Any, config: RunConfig, scorers: Any, request: Any) -> None:
    """A rank bound to a core of its own, with the recipe's engine."""
    import torch

    from unirl.distributed.models import build_model
    from unirl.distributed.pinning import pin_process
    from unirl.reward.registry import build_scorers
    from unirl.reward.stack import RewardStack
    from unirl.rollout.engine.trainside import TrainsideEngine
    from unirl.train.weights import apply_push

    pin_process(rank, config.threads_per_worker)
    torch.set_num_threads(config.threads_per_worker)
    model, stage = build_model(config, rollout_only=True)
    engine = TrainsideEngine(stage, model, apply_push)
    built = {name: build_scorers(configs) for name, configs in scorers.items()}
    while (message := pipe.recv())[0] != "end":
        _, plan, begin, name, beside = message
        stack = RewardStack(
            engine, built[name], micro_batch_size=config.reward_stack.micro_batch_size, overlap=beside
        )
        time.sleep(max(0.0, begin - time.time()))
        done = stack.run_share(request, plan, rank, coordinators if plan.needs_coordinator else None)
        pipe.send((done.calls, done.num_stolen_units))


# ---- the training tail


def training(arguments: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        cost = _fitted_cost(arguments)
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
    common = (f"num_rollouts={arguments.rollouts}", *_common(data))
    for _ in range(arguments.repeats):
        for name, overrides in variants.items():
            run_dir, _ = train("digits_sync", *common, *overrides, asynchronous=False, folder=work)
            for step, row in metrics(run_dir).items():
                if step >= WARM_UP and "reward" in row:
                    trace = json.loads((run_dir / "timeline" / f"rollout_{step:06d}.json").read_text())
                    timeline = read_trace(trace)[0][1]
                    lines[name].append({**row, "makespan_s": timeline.makespan, "timeline": timeline})
    return lines


def _config(data: Path, schedule: str, cost: Path) -> RunConfig:
    keys = [*_common(data), f"reward_stack.schedule={schedule}", f"reward_stack.cost={cost}"]
    return parse(RunConfig, read_recipe(["--config-name", "diffusion/digits/digits_sync", *keys]))


def _common(data: Path) -> tuple[str, ...]:
    return (
        "num_devices=2",
        "pin_workers=true",
        "samples_per_prompt=48",  # a rank's share has to be many calls long, or there is nothing to hand over
        "reward_stack.micro_batch_size=48",
        "sampling.height=12",
        "sampling.width=12",
        f"data.train={{name: null, path: {data}, shuffle: false}}",
        "~data.eval",
    )


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


def _fitted_cost(arguments: argparse.Namespace) -> Path:
    """The file that was given, or one that is measured once."""
    if arguments.cost is None:
        arguments.cost = Path(tempfile.mkdtemp()) / "cost.json"
        command = [
            sys.executable,
            "-m",
            "unirl.cli",
            "fit-cost",
            "--config-name",
            "diffusion/digits/digits_mixed",
        ]
        done = subprocess.run(
            [*command, "--out", str(arguments.cost)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        print(done.stdout, flush=True)
    return arguments.cost


if __name__ == "__main__":
    main()
