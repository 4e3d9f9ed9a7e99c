# SPDX-License-Identifier: Apache-2.0
"""From a run directory to its report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.metrics import SampleSet, read_samples
from unirl.report.curves import write_curves
from unirl.report.grids import write_grid
from unirl.report.html import render
from unirl.report.run_files import RunFiles, load_run
from unirl.report.summary import summarise
from unirl.report.timeline import write_run_timeline


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `curves.png`, `timeline.png`, `samples/grid_before.png`, `samples/grid_after.png` and `report.html`;
    returns the latter's path. A run of several canvases gets a pair of grids for each, `grid_before_<H>x<W>.png`.

    Reads only the files of the run directory, so it can be called while the run goes on and any number of
    times. Raises `ValueError` when the directory is none of a run, or one of its files cannot be read.
    """
    run = load_run(run_dir)
    curves = write_curves(run, run.folder / "curves.png")
    grids, last = _write_grids(run)
    timeline = write_run_timeline(run.folder)
    page = render(run, summarise(run), curves=curves, grids=grids, prompts=last, timeline=timeline)
    path = run.folder / "report.html"
    temporary = path.with_name(".report.html.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _write_grids(run: RunFiles) -> tuple[list[tuple[str, Path]], SampleSet | None]:
    if not run.samples:
        return [], None
    evaluation = run.config.get("eval")
    options: Mapping[str, Any] = evaluation if isinstance(evaluation, Mapping) else {}
    size = {"max_rows": int(options.get("grid_rows", 10)), "max_columns": int(options.get("grid_columns", 8))}
    steps = list(run.samples)
    folder = run.folder / "samples"
    shown = [("before", steps[0]), ("after", steps[-1])][: len(steps)]
    sets = [(name, step, read_samples(run.samples[step])) for name, step in shown]
    canvases = list(dict.fromkeys(image.shape[:2] for _, _, samples in sets for image in samples.images))
    grids = []
    for height, width in canvases:
        suffix, told = (f"_{height}x{width}", f", {height} x {width}") if len(canvases) > 1 else ("", "")
        for name, step, samples in sets:
            part = _of_canvas(samples, (height, width))
            if len(part):
                picture = write_grid(part, folder / f"grid_{name}{suffix}.png", **size)
                grids.append((f"{name} (evaluation at rollout {step}{told})", picture))
    return grids, sets[-1][2]


def _of_canvas(samples: SampleSet, canvas: tuple[int, int]) -> SampleSet:
    """The images of one size, in row order."""
    rows = [row for row, image in enumerate(samples.images) if image.shape[:2] == canvas]
    return SampleSet(
        images=tuple(samples.images[row] for row in rows),
        prompts=tuple(samples.prompts[row] for row in rows),
        ids=tuple(samples.ids[row] for row in rows),
        scores=tuple(samples.scores[row] for row in rows),
    )
