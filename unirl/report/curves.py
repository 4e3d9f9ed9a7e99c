# SPDX-License-Identifier: Apache-2.0
"""The curves of a run as one PNG.

Reward, |ratio-1|, clip fraction, gradient norm, phase seconds, staleness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.report.run_files import RunFiles
from unirl.report.summary import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a float32 ratio near 1 cannot resolve; zeros are drawn here, since a log axis has no zero.
LOG_FLOOR = 1e-10
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf", "#7f7f7f")
_DISTANCES = {
    "parity/abs_ratio_minus_one_max": "|ratio - 1|, own weights, max",
    "parity/abs_dlogp_max": "|Δ log-prob|, own weights, max",
    "ratio": "|ratio - 1|, all updates, mean",
    "async/drift_abs_ratio_minus_one_max": "|ratio - 1|, older weights, max",
}
"""Rows replayed under the weights that generated them show numerics alone; the others, how far the policy has moved."""


def write_curves(run: RunFiles, path: Path) -> Path:
    """Draws every panel that the run has numbers for. A run without any gets one panel that says so."""
    # Agg without pyplot: no display, no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [draw for draw, names in _panels(run) if names]
    columns = 2 if len(panels) > 1 else 1
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(6.2 * columns, 3.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for index, draw in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.ticklabel_format(axis="y", useOffset=False)  # 1.00002, not 2 under a "1e-5 + 1" in a corner
        draw(axes)
        axes.set_xlabel("rollout")
        axes.grid(True, alpha=0.3)
        labels = axes.get_legend_handles_labels()[1]
        if labels:
            axes.legend(
                fontsize="x-small" if len(labels) > 4 else "small",
                framealpha=0.7,
                ncols=2 if len(labels) > 4 else 1,
            )
    if not panels:
        figure.add_subplot(1, 1, 1).set_title("no metrics were logged")
    figure.savefig(path, dpi=110, facecolor="white")
    return path


def _panels(run: RunFiles) -> list[tuple[Callable[[Axes], None], Sequence[str]]]:
    known = [name for name in run.names() if run.series(name)[0]]
    evaluated = [name for name in known if name.startswith("eval/") and name != "eval/version"]
    scored = {"reward", *_scorers(run)}
    in_unit = [n for n in evaluated if n.rsplit("/", 1)[1] in scored and _fits_unit_range(run, n)]
    in_unit = [name for name in in_unit if not run.repeats_reward(name)]
    others = [
        name for name in evaluated if name.rsplit("/", 1)[1] not in scored or not _fits_unit_range(run, name)
    ]
    rewards = [name for name in ("reward",) if name in known] + in_unit
    components = [
        name for name in known if name.startswith("reward/") and name.removeprefix("reward/") in scored
    ]
    parity = [name for name in _DISTANCES if name in known]
    clips = [name for name in ("clip", "clip_max") if name in known]
    norms = [name for name in ("gn", "gn_max") if name in known]
    phases = [f"perf/{name}_s" for name in PHASES if f"perf/{name}_s" in known]
    tails = [name for name in ("perf/tail_ratio", "perf/train_tail_ratio") if name in known]
    lags = [name for name in ("async/staleness", "async/policy_lag") if name in known]
    return [
        (lambda axes: _draw_lines(axes, run, rewards, "reward: training and evaluation"), rewards),
        (lambda axes: _draw_parity(axes, run, parity), parity),
        (lambda axes: _draw_lines(axes, run, others, "other evaluated numbers"), others),
        (lambda axes: _draw_lines(axes, run, components, "rewards by scorer, while training"), components),
        (lambda axes: _draw_lines(axes, run, clips, "clip fraction"), clips),
        (lambda axes: _draw_lines(axes, run, norms, "gradient norm"), norms),
        (lambda axes: _draw_phases(axes, run, phases), phases),
        (lambda axes: _draw_lines(axes, run, tails, "slowest rank over the mean (1 is perfect)"), tails),
        (lambda axes: _draw_lines(axes, run, lags, "staleness (pushes), policy lag (steps)"), lags),
    ]


def _draw_lines(axes: Axes, run: RunFiles, names: Sequence[str], title: str) -> None:
    for index, name in enumerate(names):
        steps, values = run.series(name)
        marker = "o" if name.startswith("eval/") or len(steps) == 1 else None
        axes.plot(
            steps, values, label=name, color=_COLOURS[index % len(_COLOURS)], marker=marker, markersize=3.5
        )
    axes.set_title(title)


def _draw_parity(axes: Axes, run: RunFiles, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        steps, values = run.series(name)
        distances = [abs(value - 1.0) if name == "ratio" else abs(value) for value in values]
        axes.plot(
            steps,
            [max(value, LOG_FLOOR) if math.isfinite(value) else math.nan for value in distances],
            label=_DISTANCES[name],
            color=_COLOURS[index],
            marker="o",
            markersize=3,
        )
    axes.set_yscale("log")
    axes.set_title(f"distance of replay from rollout (0 drawn at {LOG_FLOOR:.0e})")


def _draw_phases(axes: Axes, run: RunFiles, names: Sequence[str]) -> None:
    steps = sorted({step for name in names for step in run.series(name)[0]})
    bottom = dict.fromkeys(steps, 0.0)
    for index, name in enumerate(names):
        heights = {s: v for s, v in zip(*run.series(name), strict=True) if math.isfinite(v)}
        label = name.removeprefix("perf/").removesuffix("_s")
        axes.bar(
            steps,
            [heights.get(step, 0.0) for step in steps],
            bottom=[bottom[step] for step in steps],
            width=1.0,
            label=label,
            color=_COLOURS[index],
        )
        for step in steps:
            bottom[step] += heights.get(step, 0.0)
    step_times = run.series("perf/step_s")
    if step_times[0]:
        axes.plot(*step_times, color="black", linewidth=1.2, label="wall of a rollout")
    axes.set_ylim(0, 1.5 * max([*bottom.values(), 1e-3]))  # room for the legend
    axes.set_ylabel("seconds")
    axes.set_title("seconds a phase (below their sum: overlapped)")


def _fits_unit_range(run: RunFiles, name: str) -> bool:
    values = [value for value in run.series(name)[1] if math.isfinite(value)]
    return all(-0.05 <= value <= 1.05 for value in values)


def _scorers(run: RunFiles) -> list[str]:
    """Names of the recipe's scorers, monitors included; the part of an `eval/...` metric after the last slash."""
    names = []
    for section in ("reward", "eval"):
        options = run.config.get(section)
        entries = options.get("scorers") if isinstance(options, Mapping) else None
        names += [entry["name"] for entry in entries or () if isinstance(entry, Mapping) and "name" in entry]
    return names
