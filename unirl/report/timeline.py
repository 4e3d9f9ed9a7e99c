# SPDX-License-Identifier: Apache-2.0
"""Which rank ran what when, as a picture: of a run's last rollout, or of simulated ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.schedule.timeline import CallTimeline, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#4c9be8", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#9c755f", "#bab0ac")
_SCORING = "#444444"
MAX_TIMELINES = 4
"""A picture of more could not be read."""


def write_run_timeline(folder: Path) -> Path | None:
    """Draws the last `timeline/rollout_*.json` of a run directory to `timeline.png`; None when there is none."""
    traces = sorted((folder / "timeline").glob("rollout_*.json"))
    if not traces:
        return None
    try:
        named = read_trace(json.loads(traces[-1].read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{traces[-1]} cannot be read: {error}") from error
    return draw_timelines(named[:MAX_TIMELINES], folder / "timeline.png", unit="s")


def draw_timelines(named: Sequence[tuple[str, CallTimeline]], path: Path, *, unit: str) -> Path:
    """One panel a timeline on a common time axis, a lane a rank; colours are canvases, hatches mark stolen work."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = [min(max(timeline.num_ranks, 2), 24) for _, timeline in named]
    figure = Figure(figsize=(10.0, sum(0.9 + 0.24 * count for count in lanes) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(named), 1, sharex=True, squeeze=False, height_ratios=[2 + n for n in lanes])
    canvases = sorted({call.canvas for _, timeline in named for call in timeline.calls}, key=_by_size)
    colours = {canvas: _COLOURS[index % len(_COLOURS)] for index, canvas in enumerate(canvases)}
    for panel, (name, timeline) in zip(axes[:, 0], named, strict=True):
        _draw(panel, timeline, colours)
        panel.set_title(
            f"{name}: {timeline.makespan:.4g} {unit}, ideal {timeline.ideal:.4g}, ratio {timeline.tail_ratio:.3f}",
            fontsize="medium",
        )
    axes[-1, 0].set_xlabel(unit)
    axes[-1, 0].set_xlim(0.0, 1.01 * max(timeline.makespan for _, timeline in named) or 1.0)
    figure.legend(handles=_legend(named, colours), loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(path, dpi=110, facecolor="white")
    return path


def _draw(axes: Axes, timeline: CallTimeline, colours: dict[str, str]) -> None:
    for call in timeline.calls:
        scoring = call.phase == "score"
        axes.broken_barh(
            [(call.start - timeline.begin, call.end - call.start)],
            (call.rank - 0.45, 0.25) if scoring else (call.rank - 0.2, 0.6),
            facecolors=_SCORING if scoring else colours[call.canvas],
            edgecolor="white",
            linewidth=0.4,
            hatch="////" if call.stolen and not scoring else None,
        )
    axes.axvline(timeline.ideal, color="black", linestyle="--", linewidth=1.0)
    axes.set_ylim(timeline.num_ranks - 0.5, -0.6)
    axes.set_yticks(range(timeline.num_ranks) if timeline.num_ranks <= 24 else [])
    axes.set_ylabel("rank")


def _legend(named: Sequence[tuple[str, CallTimeline]], colours: dict[str, str]) -> list[object]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    calls = [call for _, timeline in named for call in timeline.calls]
    handles: list[object] = [Patch(facecolor=colour, label=canvas) for canvas, colour in colours.items()]
    if any(call.stolen for call in calls):
        handles.append(
            Patch(facecolor="white", edgecolor="black", hatch="////", label="run for another rank")
        )
    if any(call.phase == "score" for call in calls):
        handles.append(Patch(facecolor=_SCORING, label="scoring"))
    handles.append(Line2D([], [], color="black", linestyle="--", label="ideal"))
    return handles


def _by_size(canvas: str) -> tuple[int, str]:
    """Small canvases first; what is no single canvas last."""
    sides = canvas.split(" ")[0].split("x")
    if not all(side.isdigit() for side in sides):
        return 1 << 62, canvas
    return int(sides[0]) * int(sides[-1] if len(sides) > 1 else 1), canvas
