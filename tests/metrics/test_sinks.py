# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.metrics import JsonlSink, MultiSink, TensorBoardSink, check_sinks, open_sinks, read_metrics
from unirl.protocols import MetricsSink

without_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is not None, reason="wandb is installed here"
)


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(0, {"reward": 0.25, "rows/dropped": 0, "note": "text", "clip": None})
    sink.write(1, {"reward": 0.5})
    sink.close()
    assert scalars_of(tmp_path) == {"reward": [(0, 0.25), (1, 0.5)], "rows/dropped": [(0, 0.0)]}


def test_tensorboard_forgets_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in range(4):
        first.write(step, {"reward": 0.0})
    first.close()
    second = TensorBoardSink(tmp_path, first_step=2)
    second.write(2, {"reward": 1.0})
    second.close()
    assert scalars_of(tmp_path)["reward"] == [(0, 0.0), (1, 0.0), (2, 1.0)]


def test_open_sinks_writes_the_local_file_and_tensorboard(tmp_path: Path) -> None:
    sink = open_sinks(tmp_path)
    assert isinstance(sink, MetricsSink)
    sink.write(0, {"reward": 0.5})
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward"] == 0.5
    assert scalars_of(tmp_path / "tensorboard") == {"reward": [(0, 0.5)]}


@without_wandb
def test_wandb_asked_for_and_missing_is_an_error_that_names_the_key_and_the_command() -> None:
    with pytest.raises(ValueError, match=r"logging\.wandb.*pip install.*logging\.wandb: false"):
        check_sinks(tensorboard=False, wandb=True)


def test_a_resumed_run_goes_on_in_wandb_under_its_id_and_a_new_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for first_step in (0, 2, 0):
        sink = open_sinks(
            tmp_path, tensorboard=False, wandb=True, config={"a": {"b": 1}}, first_step=first_step
        )
        sink.write(first_step, {"reward": 0.5, "gn": float("nan"), "note": "text", "clip": None})
        sink.close()
        ids.append((tmp_path / "wandb_run_id").read_text())
    assert ids[0] == ids[1] != ids[2]


@without_wandb
def test_a_missing_sink_leaves_the_run_directory_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wandb"):
        open_sinks(tmp_path / "run", wandb=True)
    assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_keeps_no_other_from_its_line(tmp_path: Path) -> None:
    class Broken:
        def write(self, step: int, metrics: object) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            raise OSError("still full")

    sink = MultiSink([Broken(), JsonlSink(tmp_path / "metrics.jsonl")])
    with pytest.raises(OSError, match="disk full"):
        sink.write(0, {"reward": 0.5})
    with pytest.raises(OSError, match="still full"):
        sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["reward"] == 0.5


def test_importing_the_metrics_imports_no_sink_package() -> None:
    code = (
        "import sys, unirl.metrics; "
        "print([m for m in ('wandb', 'tensorboard', 'rich', 'matplotlib', 'ray') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
