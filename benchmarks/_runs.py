# SPDX-License-Identifier: Apache-2.0
"""Whole training runs as subprocesses, and the rows that benchmarks leave in `results/*.jsonl`."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"


def train(recipe: str, *overrides: str, asynchronous: bool, folder: Path | None = None) -> tuple[Path, float]:
    """Runs a digits recipe to its end; returns the run directory and its wall seconds, start-up included."""
    run_dir = Path(folder or tempfile.mkdtemp()) / f"{recipe}-{time.time_ns()}"
    entry = "unirl.train_async_diffusion" if asynchronous else "unirl.train_diffusion"
    command = [
        sys.executable,
        "-m",
        entry,
        f"--config-name=diffusion/digits/{recipe}",
        f"run_dir={run_dir}",
        "logging.console=plain",
        "logging.tensorboard=false",
        *overrides,
    ]
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return run_dir, time.perf_counter() - begin


def metrics(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Step -> its numbers; lines of one step are merged."""
    steps: dict[int, dict[str, Any]] = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        steps.setdefault(row["step"], {}).update(row)
    return steps


def curve(run_dir: Path, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric."""
    points = [
        (step, row[name]) for step, row in sorted(metrics(run_dir).items()) if row.get(name) is not None
    ]
    return [p[0] for p in points], [p[1] for p in points]


def record(stem: str, rows: list[dict[str, Any]]) -> Path:
    """Appends rows with hardware, versions, date and commit to `results/<stem>.jsonl`."""
    import torch

    common = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain") else ""),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{stem}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps(common | row) + "\n")
    return path


def table(header: list[str], rows: list[list[str]]) -> str:
    """Aligned columns."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [header, *rows]
    )


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
