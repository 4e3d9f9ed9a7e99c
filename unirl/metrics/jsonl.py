# SPDX-License-Identifier: Apache-2.0
"""`metrics.jsonl`: one JSON object a line, written as the run goes, and the reader that merges the lines of a
step.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from unirl.metrics.scalars import to_scalar

RESERVED = ("step", "time")


class JsonlSink:
    """Appends `{"step": rollout id, "time": unix seconds, name: value, ...}` to `path`, flushed a line at a
    time.

    JSON has no NaN and no infinity: a non-finite number is written as `null`, which `read_metrics` gives back
    as NaN. So `null` always says "measured, and not a finite number"; a metric that was not measured is
    absent from the line. Metrics given as None are left out.

    An existing file is continued (a resumed run). A last line without a newline is what a killed process
    left: it is cut off, or the next line would be glued to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._clock = clock

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one line. Raises `ValueError` for a metric called `step` or `time`, or one that is not a
        scalar.
        """
        line: dict[str, Any] = {"step": int(step), "time": round(self._clock(), 3)}
        for name, given in metrics.items():
            if name in RESERVED:
                raise ValueError(
                    f"a metric is called {name!r}; that name is the line's own, allowed: any other name"
                )
            value = to_scalar(name, given)
            if value is None:
                continue
            line[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._file.write(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`, one a step in increasing order; lines of one step are merged, later
    values win.

    A line that goes back to an earlier step begins a resumed run: what was logged before for that step and
    later ones is superseded by it and dropped. `null` becomes NaN. An unfinished last line (a run that is
    being written, or was killed) is left out; any other line that is not a JSON object with a whole-number
    `step` raises `ValueError` with file and line.
    """
    rows: dict[int, dict[str, Any]] = {}
    latest = -math.inf
    for _, row in _lines(path):
        step = row["step"]
        if step < latest:
            rows = {kept: values for kept, values in rows.items() if kept < step}
        latest = step
        rows.setdefault(step, {}).update(row)
    return [rows[step] for step in sorted(rows)]


def lines_before(path: str | os.PathLike[str], step: int) -> str:
    """The lines of a `metrics.jsonl` that are of steps before `step`, as they are, an unfinished last line left out. Raises as
    `read_metrics` does.
    """
    return "".join(f"{line}\n" for line, row in _lines(path) if row["step"] < step)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The whole lines that are not blank, each with what it says."""
    for number, raw in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        if raw.strip():
            yield _parse(raw, f"{path}:{number}")


def _parse(raw: bytes, where: str) -> tuple[str, dict[str, Any]]:
    try:
        line = raw.decode("utf-8")
        row = json.loads(line)
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{where}: not a JSON object ({error}); restore the line or delete it") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or isinstance(row.get("step"), bool):
        raise ValueError(
            f'{where}: expected a JSON object with a whole-number "step"; restore the line or delete it'
        )
    return line, {name: math.nan if value is None else value for name, value in row.items()}


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)
