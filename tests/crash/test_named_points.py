# SPDX-License-Identifier: Apache-2.0
"""Killed and interrupted at every named point, resumed each time: the end is that of a run that nothing happened to."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from legs import adapter, assert_nothing_is_left, leg
from recipes import metrics, recipe

from unirl.config import RunConfig
from unirl.entry import EXIT_INTERRUPTED, EXIT_WORKER_LOST
from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

POINTS = {
    "generating": "rollout-0:generate.micro:4",
    "finished but not reaped": "rollout-0:generated:1",
    "scoring": "rollout-0:score.micro:4",
    "between micros": "train-0:train.micro:2",
    "after a step before its push": "train-0:build_push:2",
    "before a push lands": "rollout-0:load:2",
    "within a push": "rollout-0:loaded:2",
    "within a checkpoint": "train-0:checkpoint.section:4",
    "between its rename and its pointer": "train-0:checkpoint.renamed:1",
    "within an evaluation": "rollout-0:evaluate:1",
}
ENDS = {
    "kill": EXIT_WORKER_LOST,
    "kill-driver": -signal.SIGKILL,
    "interrupt-driver": EXIT_INTERRUPTED,
}


def of_the_crash_tests(base: Path, run_dir: Path, **changes: Any) -> RunConfig:
    return recipe(
        base,
        run_dir,
        **{
            "num_rollouts": 6,
            "save_interval": 1,
            "eval_interval": 1,
            "layout": "separate",
            "num_devices": 2,
            "buffer_max_staleness": 1,
            **changes,
        },
    )


def trained(run: Path) -> list[tuple[Any, ...]]:
    return [(m["step"], m["reward"], m["gn"], m["async/staleness"]) for m in metrics(run) if "reward" in m]


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    return AsyncDiffusionTrainer(of_the_crash_tests(random_base, folder)).run()


def assert_same_end(want: Path, got: Path) -> None:
    left, right = adapter(want), adapter(got)
    assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
    assert trained(got) == trained(want)
    steps = [m["step"] for m in metrics(want)]
    assert [m["step"] for m in metrics(got)] == steps == list(range(len(steps))), "one line a step"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("end", ENDS)
def test_a_run_survives_its_end_at_every_named_point(
    uninterrupted: Path, random_base: Path, tmp_path: Path, end: str
) -> None:
    config = of_the_crash_tests(random_base, tmp_path / "run")
    points = list(POINTS.items())
    if end == "kill-driver":
        points = points[::2]  # a driver holds nothing that is written: where its workers stand matters less
    for name, where in points:
        code, text = leg(config, f"{where}:{end}")
        assert code == ENDS[end], f"{name}: {code}\n{text}"
        if end == "kill":
            slab, rank = where.split(":")[0].split("-")
            assert f"{slab} worker {rank} (process" in text and "died while it was at" in text, text
            assert f"(at {where.split(':')[1]})" in text, text
        if end != "kill-driver":
            assert "resume=auto" in text, text
    code, text = leg(config)
    assert code == 0, text
    assert_same_end(uninterrupted, tmp_path / "run")
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_survives_ten_ends_at_random_times(
    ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    """Times drawn from one seed, within a second of the first step of any of the processes; a driver is also interrupted."""
    generator = torch.Generator().manual_seed(20)
    long = {"num_rollouts": 24}  # more than ten seconds of work, however often it is lost
    want = AsyncDiffusionTrainer(of_the_crash_tests(random_base, tmp_path / "uninterrupted", **long)).run()
    config = of_the_crash_tests(random_base, tmp_path / "run", **long)
    whose = ("driver:kill", "driver:interrupt-driver", "train-0:kill", "rollout-0:kill")
    survived = 0
    for _ in range(10):
        who, what = whose[int(torch.randint(4, (), generator=generator))].split(":")
        seconds = float(torch.rand((), generator=generator))
        code, text = leg(config, f"{who}:after_s:{seconds:.2f}:{what}")
        if code == 0:
            break  # it was through before its time had come
        assert code in (EXIT_WORKER_LOST, EXIT_INTERRUPTED, -signal.SIGKILL), text
        survived += 1
    code, text = leg(config)
    assert code == 0, text
    assert survived >= 5
    assert_same_end(want, tmp_path / "run")
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restarted_rollout_worker_changes_no_bit(
    uninterrupted: Path, random_base: Path, tmp_path: Path
) -> None:
    """One run, no resume: the worker dies while it generates, while it is given weights, and while it evaluates."""
    config = of_the_crash_tests(random_base, tmp_path / "run", max_worker_restarts=3)
    points = ("rollout-0:generate.micro:4", "rollout-0:loaded:3", "rollout-0:evaluate:2")
    (tmp_path / "fired").mkdir()
    code, text = leg(config, ",".join(f"{point}:kill" for point in points), once=str(tmp_path / "fired"))
    assert code == 0, text
    assert text.count("it is started again") == 3, text
    assert metrics(tmp_path / "run")[-1]["workers/restarts"] == 3
    assert_same_end(uninterrupted, tmp_path / "run")
