# SPDX-License-Identifier: Apache-2.0
"""Which rank generates and scores a row changes nothing about a run but its clock."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import metrics, recipe
from safetensors.torch import load_file

from unirl.schedule.timeline import read_trace
from unirl.trainer.async_diffusion import AsyncDiffusionTrainer
from unirl.trainer.diffusion import DiffusionTrainer

MIXED: dict[str, Any] = {
    "num_rollouts": 2,
    "batch_size": 4,
    "samples_per_prompt": 3,
    "num_devices": 3,
    "layout": "separate",
    "train_fraction": 0.34,
    "sampling__height": 12,
    "sampling__width": 12,
    "reward_stack__micro_batch_size": 2,
    "data": {"train": {"name": "digits_mixed"}},
}


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def unscheduled(ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DiffusionTrainer(recipe(random_base, tmp_path_factory.mktemp("none") / "run", **MIXED)).run()


def assert_same_run(run: Path, other: Path) -> None:
    want, got = adapter(other), adapter(run)
    assert all(torch.equal(want[name], got[name]) for name in want)
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        assert mine["reward"] == theirs["reward"] and mine["gn"] == theirs["gn"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"reward_stack__schedule": "owner"}, marks=pytest.mark.slow),
        pytest.param({"reward_stack__schedule": "ring"}, marks=pytest.mark.slow),
        {"reward_stack__schedule": "steal", "reward_stack__cost": {"a": 1e-4, "c": 1e-3}},
        pytest.param({"reward__dispatch": "balanced"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "reward_stack__schedule": "steal",
                "reward__dispatch": "balanced",
                "reward_stack__overlap": True,
            },
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"reward_stack__schedule": "steal", "transport_kind": "colocate_store"}, marks=pytest.mark.slow
        ),
    ],
    ids=["owner", "ring", "steal", "balanced scoring", "steal and balanced scoring", "steal, colocate_store"],
)
def test_every_schedule_trains_the_same_weights_as_none(
    unscheduled: Path, random_base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    # The training shards follow the cost model, but there is one training rank, so they are the same here.
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", **(MIXED | changes))).run()
    assert_same_run(run, unscheduled)


@pytest.mark.slow
def test_stealing_in_the_async_trainer_trains_the_same_weights(
    ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    runs = []
    for name, schedule in {"none": None, "steal": "steal"}.items():
        changes = {**MIXED, "buffer_max_staleness": 1, "max_inflight": 2, "reward_stack__schedule": schedule}
        runs.append(AsyncDiffusionTrainer(recipe(random_base, tmp_path / name, **changes)).run())
    assert_same_run(*runs)


def test_a_run_says_how_its_ranks_were_used(unscheduled: Path) -> None:
    for line in metrics(unscheduled):
        assert line["perf/tail_ratio"] >= 1.0
        assert line["perf/idle_s"] == pytest.approx(
            (line["perf/idle_s/rank_0"] + line["perf/idle_s/rank_1"]) / 2
        )
        assert line["schedule/calls"] == 8 and line["schedule/stolen_units"] == 0
        assert line["perf/train_tail_ratio"] == 1.0  # one training rank
    traces = sorted((unscheduled / "timeline").iterdir())
    assert [path.name for path in traces] == ["rollout_000000.json", "rollout_000001.json"]
    ((_, timeline),) = read_trace(json.loads(traces[1].read_text()))
    assert timeline.num_ranks == 2
    assert timeline.tail_ratio == pytest.approx(metrics(unscheduled)[1]["perf/tail_ratio"], rel=1e-6)


def test_a_cost_that_cannot_weigh_the_data_is_refused_before_anything_starts(
    random_base: Path, tmp_path: Path
) -> None:
    for changes, message in (
        ({"reward_stack__cost": "nowhere.json"}, r"reward_stack\.cost names the file nowhere\.json"),
        ({"reward_stack__cost": {"a": 1.0, "q": 2.0}}, r"unknown coefficients \['q'\]"),
        (
            {"reward_stack__cost": {"a": 1.0}, "data": {"train": {"name": "digits_edit"}}},
            "no d and e",
        ),
        ({"reward_stack__schedule": "stealing"}, r"did you mean 'steal'"),
    ):
        with pytest.raises(ValueError, match=message):
            DiffusionTrainer(recipe(random_base, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"reward_stack__schedule": "steal"}, "workers/left_out"),
        ({"reward_stack__schedule": "owner"}, "workers/left_out"),
        ({"reward_stack__schedule": "steal", "max_worker_restarts": 1}, "workers/restarts"),
    ],
    ids=["steal", "owner", "steal, started again"],
)
def test_a_run_whose_rollout_worker_dies_under_a_schedule_trains_the_same_weights(
    unscheduled: Path,
    random_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    counted: str,
) -> None:
    (tmp_path / "once").mkdir()
    monkeypatch.setenv("UNIRL_FAILPOINT", "rollout-0:generate.micro:2:kill")
    monkeypatch.setenv("UNIRL_FAILPOINT_ONCE", str(tmp_path / "once"))
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", **(MIXED | changes))).run()
    assert list((tmp_path / "once").iterdir())
    assert_same_run(run, unscheduled)
    assert metrics(run)[-1][counted] == 1


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind a process to cores")
def test_workers_bound_to_cores_of_their_own_train_the_same_weights(
    ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("two cores are needed")
    changes = {**MIXED, "num_devices": 2, "train_fraction": 0.5, "reward_stack__schedule": "steal"}
    free, bound = (
        DiffusionTrainer(recipe(random_base, tmp_path / name, **changes, pin_workers=pinned)).run()
        for name, pinned in (("free", False), ("bound", True))
    )
    assert_same_run(bound, free)
    logs = [log.read_text() for log in (bound / "logs").glob("*.log")]
    cores = [re.findall(r"^bound to cores (.*)$", log, re.MULTILINE) for log in logs]
    assert sorted(cores) == [[str(core)] for core in usable[:2]]
