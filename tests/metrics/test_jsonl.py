# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from unirl.metrics import JsonlSink, read_metrics


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_a_json_object_with_step_and_time(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 12.5)
    sink.write(3, {"reward": torch.tensor(0.25), "rows/dropped": np.int64(2), "note": "ja", "done": True})
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"step": 3, "time": 12.5, "reward": 0.25, "rows/dropped": 2, "note": "ja", "done": 1}
    ]
    sink.close()


def test_a_line_is_readable_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(3):
        sink.write(step, {"reward": step / 2})
        assert [row["reward"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [
            s / 2 for s in range(step + 1)
        ]
    sink.close()


def test_a_non_finite_number_is_null_and_an_unmeasured_one_is_absent(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", clock=lambda: 0.0)
    sink.write(0, {"reward": float("nan"), "gn": torch.tensor(float("inf")), "clip": None, "ratio": 1.0})
    sink.close()
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"step": 0, "time": 0.0, "reward": None, "gn": None, "ratio": 1.0}
    ]
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["reward"]) and math.isnan(row["gn"]) and "clip" not in row


@pytest.mark.parametrize(
    ("metrics", "message"),
    [({"step": 1}, "'step'"), ({"gn": torch.zeros(2)}, r"'gn'.*\[2\]"), ({"x": [1]}, "'x' is list")],
)
def test_what_is_not_one_number_is_refused_by_name(tmp_path: Path, metrics: dict, message: str) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=message):
        sink.write(0, metrics)
    sink.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_lines_of_one_step_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 0, "eval/reward": 0.4}\n{"step": 0, "reward": 0.3}\n{"step": 1, "reward": 0.5}\n'
    )
    assert read_metrics(path) == [{"step": 0, "eval/reward": 0.4, "reward": 0.3}, {"step": 1, "reward": 0.5}]


def test_a_resumed_run_supersedes_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in range(6):
        first.write(step, {"reward": 0.1, "only/first": step})
    first.close()
    second = JsonlSink(path)
    second.write(3, {"reward": 0.9})
    second.close()
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["reward"] == 0.9 and "only/first" not in rows[3]


def test_a_line_torn_by_a_kill_is_cut_off_when_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward": 0.3}\n{"step": 1, "rew')
    assert [row["step"] for row in read_metrics(path)] == [0]
    sink = JsonlSink(path)
    sink.write(1, {"reward": 0.5})
    sink.close()
    assert [row["reward"] for row in read_metrics(path)] == [0.3, 0.5]


@pytest.mark.parametrize("line", ["[1]", "{}", '{"step": "1"}', "reward=1"])
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)
