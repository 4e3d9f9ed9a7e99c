# SPDX-License-Identifier: Apache-2.0
"""The operators' benchmarks run, find the operators right, and write rows that say what was measured and where."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
OPERATORS = {
    "sibling_prefix_attention": 2e-6,
    "packing": 0,
    "digest": 0,
    "flow": 2e-6,
    "guidance": 2e-6,
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(bench: ModuleType, folder: Path, *more: str) -> argparse.Namespace:
    return bench.parser("").parse_args(["--quick", "--device=cpu", f"--results={folder}", *more])


@pytest.mark.parametrize("stem", OPERATORS)
def test_quick_run_finds_the_operator_right(stem: str, load: Any, tmp_path: Path) -> None:
    load(f"bench_{stem}").main(["--quick", "--device=cpu", f"--results={tmp_path}"])
    rows = read(tmp_path / f"{stem}.jsonl")
    assert (tmp_path / f"bench_{stem}.png").stat().st_size > 1000
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(f"{row['op']} {row['mode']} {row.get('renorm')}", []).append(row)
    for case in cases.values():
        ours = [row for row in case if row["provider"].startswith("ours")]
        assert ours and all(row["error"] <= OPERATORS[stem] for row in ours)
        assert any("ms" in row for row in case if row not in ours)
    for row in rows:
        assert row["date"] and row["commit"] and row["cpu"] and row["torch"] == torch.__version__
        if "gbps" in row:
            assert row["of_copy"] == pytest.approx(row["gbps"] / 1e3 / row["copy_tbps"], rel=1e-3)


def test_a_peer_that_raises_is_kept_as_missing(load: Any, tmp_path: Path) -> None:
    bench = load("_bench")

    def broken() -> None:
        raise RuntimeError("no such kernel\nsecond line")

    with bench.Bench("broken", options(bench, tmp_path), num_cases=1) as run:
        run.measure("add", "forward", {"N": 1}, {"works": lambda: 1 + 1, "broken": broken}, moved_bytes=8)
    missing, works = read(tmp_path / "broken.jsonl")
    assert missing["missing"] == "RuntimeError: no such kernel" and "ms" not in missing
    assert works["provider"] == "works" and works["ms"] >= 0


def test_rows_measured_before_an_error_are_written(load: Any, tmp_path: Path) -> None:
    bench = load("_bench")
    with (
        pytest.raises(KeyError, match="later"),
        bench.Bench("early", options(bench, tmp_path), num_cases=2) as run,
    ):
        run.measure("add", "forward", {"N": 1}, {"works": lambda: 1 + 1}, moved_bytes=8)
        raise KeyError("later")
    assert len(read(tmp_path / "early.jsonl")) == 1


def test_rounds_end_with_the_seconds_but_not_before_the_third(load: Any) -> None:
    bench = load("_bench")
    slow = {"slow": lambda: time.sleep(0.01)}
    timings = bench.interleaved(slow, torch.device("cpu"), rounds=50, seconds=0.0)
    assert timings["slow"].rounds == 3
    assert timings["slow"].ms >= 10


def test_plots_show_the_newest_run_and_prefer_a_gpu(load: Any, tmp_path: Path) -> None:
    rows = [
        {"date": "2026-01-01", "at": "2026-01-01T10", "hardware": "a GPU", "ms": 1},
        {"date": "2026-01-01", "at": "2026-01-01T11", "hardware": "a GPU", "ms": 2},
        {"date": "2026-01-02", "at": "2026-01-02T10", "ms": 3},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["ms"] for row in load("_plots").newest_run(path)] == [2]
