# SPDX-License-Identifier: Apache-2.0
"""The numbers that a reader of the report wants first.

Before and after, the worst of the ratio, where the time went.
"""

from __future__ import annotations

import dataclasses
import math

from unirl.report.run_files import RunFiles

PHASES = ("generate", "transfer", "score", "train", "push", "eval")
"""What a rollout's time goes into.

They overlap in an async run, so `step` (the whole rollout) may be less.
"""


@dataclasses.dataclass(frozen=True)
class BeforeAfter:
    """One evaluated number at the first and at the last evaluation."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclasses.dataclass(frozen=True)
class PhaseTime:
    """Seconds of one phase: median a rollout and total of the run."""

    name: str
    median_s: float
    total_s: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `report.html` says at its top. Counts are over the whole run; NaN where nothing was logged."""

    num_rollouts: int
    evaluations: tuple[BeforeAfter, ...]
    parity_ratio_max: float
    mean_ratio_distance_max: float
    dlogp_max: float
    clip_max: float
    staleness_max: float
    policy_lag_max: float
    dropped_rows: float
    skipped_steps: float
    phases: tuple[PhaseTime, ...]


def summarise(run: RunFiles) -> Summary:
    """Reduces a run's metrics to a `Summary`."""
    evaluated = [
        n for n in run.names() if n.startswith("eval/") and n != "eval/version" and not run.repeats_reward(n)
    ]
    evaluated.sort(key=lambda name: (name.count("/"), not name.endswith("/reward"), name))
    numbers = tuple(BeforeAfter(name, *run.first_and_last(name)) for name in evaluated if run.series(name)[0])
    return Summary(
        num_rollouts=len(run.series("reward")[0]),
        evaluations=numbers,
        parity_ratio_max=_largest(run.series("parity/abs_ratio_minus_one_max")[1]),
        mean_ratio_distance_max=_largest([abs(value - 1.0) for value in run.series("ratio")[1]]),
        dlogp_max=_largest(run.series("parity/abs_dlogp_max")[1]),
        clip_max=_largest(run.series("clip_max")[1] or run.series("clip")[1]),
        staleness_max=_largest(run.series("async/staleness")[1]),
        policy_lag_max=_largest(run.series("async/policy_lag")[1]),
        dropped_rows=_total(run.series("rows/dropped")[1]),
        skipped_steps=_total(run.series("train/skipped_steps")[1]),
        phases=tuple(_phase(run, name) for name in (*PHASES, "step") if run.series(f"perf/{name}_s")[0]),
    )


def sentence(summary: Summary) -> str:
    """The run in one sentence of plain words."""
    rollouts = f"{summary.num_rollouts} rollout{'' if summary.num_rollouts == 1 else 's'}"
    main = next((item for item in summary.evaluations if item.name == "eval/reward"), None)
    if main is None or not math.isfinite(main.change):
        return (
            f"{rollouts}; no evaluation was logged, so nothing is said about whether the policy got better."
        )
    if main.change == 0:
        return f"{rollouts}; the evaluation reward is {number(main.after)}, as it was at the start."
    direction = "rose" if main.change > 0 else "fell"
    return (
        f"{rollouts}; the evaluation reward {direction} from {number(main.before)} to {number(main.after)}."
    )


def number(value: float) -> str:
    """Four significant digits, scientific below 1e-3; n/a for what is not finite."""
    if not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:.4g}"


def _phase(run: RunFiles, name: str) -> PhaseTime:
    values = sorted(value for value in run.series(f"perf/{name}_s")[1] if math.isfinite(value))
    if not values:
        return PhaseTime(name, math.nan, math.nan)
    middle = len(values) // 2
    median = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
    return PhaseTime(name, median, sum(values))


def _largest(values: list[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=math.nan)


def _total(values: list[float]) -> float:
    return sum(value for value in values if math.isfinite(value)) if values else math.nan
