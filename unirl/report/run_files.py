# SPDX-License-Identifier: Apache-2.0
"""What a run directory holds, read once."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.config import read_recipe_file
from unirl.metrics import read_metrics

_SAMPLES = re.compile(r"eval_(\d+)\.npz")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """The files of one run.

    Attributes:
        folder: the run directory.
        rows: of `metrics.jsonl`, one mapping a step, in order.
        config_text: `config.yaml` as it is, or None.
        config: the same, parsed.
        plan: `plan.txt`, or None.
        environment: `environment.json`, or empty.
        samples: `{step: path}` of `samples/eval_<step>.npz`, in order.
    """

    folder: Path
    rows: list[dict[str, Any]]
    config_text: str | None
    config: Mapping[str, Any]
    plan: str | None
    environment: Mapping[str, Any]
    samples: Mapping[int, Path]

    def names(self) -> list[str]:
        """Every metric that some step has, sorted; the lines' own `step` and `time` left out."""
        return sorted({name for row in self.rows for name in row} - {"step", "time"})

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one numeric metric; NaN where a step logged a value that was not finite."""
        steps, values = [], []
        for row in self.rows:
            value = row.get(name)
            if isinstance(value, (int, float)):
                steps.append(row["step"])
                values.append(float(value))
        return steps, values

    def repeats_reward(self, name: str) -> bool:
        """Whether `eval/.../<scorer>` is the whole reward of its set, so that showing both says nothing more."""
        reward = name.rsplit("/", 1)[0] + "/reward"
        return name != reward and self.series(name) == self.series(reward)

    def first_and_last(self, name: str) -> tuple[float, float]:
        """The first and the last finite value of a metric; NaN twice when it has none."""
        finite = [value for value in self.series(name)[1] if math.isfinite(value)]
        return (finite[0], finite[-1]) if finite else (math.nan, math.nan)


def load_run(run_dir: str | os.PathLike[str]) -> RunFiles:
    """Reads a run directory.

    Raises `ValueError` when it has no `metrics.jsonl` or one that cannot be read, or a damaged
    `config.yaml`.
    """
    folder = Path(run_dir)
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        found = sorted(entry.name for entry in folder.iterdir())[:20] if folder.is_dir() else "nothing"
        raise ValueError(f"{folder} is no run directory: it has no metrics.jsonl (found: {found})")
    config_text = _text(folder / "config.yaml")
    environment = _text(folder / "environment.json")
    samples: dict[int, Path] = {}
    for path in sorted((folder / "samples").glob("eval_*.npz")):
        match = _SAMPLES.fullmatch(path.name)
        if match:
            samples[int(match[1])] = path
    return RunFiles(
        folder=folder,
        rows=read_metrics(metrics),
        config_text=config_text,
        config={} if config_text is None else read_recipe_file(folder / "config.yaml"),
        plan=_text(folder / "plan.txt"),
        environment=_parse_json(environment, folder / "environment.json"),
        samples=dict(sorted(samples.items())),
    )


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _parse_json(text: str | None, path: Path) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    return parsed if isinstance(parsed, Mapping) else {}
