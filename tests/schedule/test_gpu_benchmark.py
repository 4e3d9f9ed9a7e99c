# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark of the schedules, from end to end without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.schedule.timeline import read_trace

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_cpu_and_every_schedule_does_every_row_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "bench_schedule_gpu.py"),
        "--device",
        "cpu",
        "--tiny",
    ]
    done = subprocess.run(
        [*command, "--ranks", "2", "--rows", "3", "--groups", "3", "--repeats", "1", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "schedule_gpu.jsonl").read_text().splitlines()]
    assert len([row for row in rows if row["part"] == "sweep"]) == 15
    rollouts = {row["schedule"]: row for row in rows if row["part"] == "rollout"}
    timelines = dict(read_trace(json.loads((tmp_path / "schedule_gpu_trace.json").read_text())))
    assert set(rollouts) == set(timelines) == {"owner", "steal, whole groups", "steal, adaptive units"}
    for name, timeline in timelines.items():
        assert sum(call.num_rows for call in timeline.calls) == 2 * 3 * 3
        assert (
            rollouts[name]["over_ideal"] == pytest.approx(timeline.tail_ratio, rel=1e-6)
            and timeline.tail_ratio >= 1
        )
    assert rollouts["owner"]["stolen"] == 0
