# SPDX-License-Identifier: Apache-2.0
"""Both trainers on real workers of a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recipes import metrics, recipe
from safetensors.torch import load_file

from unirl.trainer.async_diffusion import AsyncDiffusionTrainer
from unirl.trainer.diffusion import DiffusionTrainer

ASYNC = {"layout": "separate", "num_devices": 2, "buffer_max_staleness": 1}


@pytest.fixture(scope="module")
def async_run(ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("async") / "run"
    return AsyncDiffusionTrainer(recipe(random_base, folder, num_rollouts=4, save_interval=2, **ASYNC)).run()


def test_a_run_leaves_what_it_promises(async_run: Path) -> None:
    for name in (
        "config.yaml",
        "plan.txt",
        "environment.json",
        "metrics.jsonl",
        "adapter/adapter_config.json",
    ):
        assert (async_run / name).is_file(), name
    assert sorted(p.name for p in (async_run / "samples").iterdir()) == ["eval_000000.npz", "eval_000004.npz"]
    assert sorted(p.name for p in (async_run / "checkpoints").iterdir()) == [
        "latest.json",
        "step_000002",
        "step_000004",
    ]


def test_replay_before_an_update_gives_the_rollouts_log_probs_back_under_lag_too(async_run: Path) -> None:
    lines = [m for m in metrics(async_run) if "reward" in m]
    assert [m["step"] for m in lines] == [0, 1, 2, 3]
    assert max(m["async/policy_lag"] for m in lines) > 0
    assert all(m["parity/abs_dlogp_max"] == 0.0 for m in lines)


def test_the_second_update_has_moved_and_the_first_has_not(async_run: Path) -> None:
    first = metrics(async_run)[0]
    assert first["ratio/update_0"] == 1.0
    assert first["abs_ratio_minus_one_max"] > 0


def test_staleness_stays_within_its_bound_and_nothing_is_evicted(async_run: Path) -> None:
    lines = [m for m in metrics(async_run) if "reward" in m]
    assert [m["async/staleness"] for m in lines] == [0, 1, 1, 1]
    assert all(m["async/evicted_groups"] == 0 for m in lines)


def test_an_async_evaluation_names_the_version_it_measured(async_run: Path) -> None:
    evaluated = {m["step"]: m["eval/version"] for m in metrics(async_run) if "eval/version" in m}
    assert evaluated == {0: 0, 4: 4}


@pytest.mark.parametrize(
    "changes", [{"num_devices": 1}, {"layout": "separate", "num_devices": 2}], ids=["colocate", "separate"]
)
def test_layouts_train_the_same_weights(
    ray_cluster: None,
    random_base: Path,
    tmp_path: Path,
    changes: dict[str, object],
    sync_adapter: dict[str, torch.Tensor],
) -> None:
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", **changes)).run()
    trained = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(trained[name], sync_adapter[name]) for name in sync_adapter)
    assert any(float(t.abs().max()) > 0 for name, t in trained.items() if "lora_B" in name)


@pytest.fixture(scope="module")
def sync_adapter(
    ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """What three rollouts of an async run that may not lag give: the sync trainers' result, by another road."""
    folder = tmp_path_factory.mktemp("on_policy") / "run"
    changes = {**ASYNC, "buffer_max_staleness": 0}
    run = AsyncDiffusionTrainer(recipe(random_base, folder, **changes)).run()
    return load_file(run / "adapter" / "adapter_model.safetensors")


def test_a_resumed_run_equals_an_uninterrupted_one(
    async_run: Path, ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    changes = {**ASYNC, "save_interval": 2}
    folder = tmp_path / "run"
    AsyncDiffusionTrainer(recipe(random_base, folder, num_rollouts=4, **changes)).run()
    resumed = tmp_path / "resumed"
    (resumed / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step_000002").rename(resumed / "checkpoints" / "step_000002")
    (folder / "config.yaml").rename(resumed / "config.yaml")
    AsyncDiffusionTrainer(recipe(random_base, resumed, num_rollouts=4, resume="auto", **changes)).run()
    assert [m["step"] for m in metrics(resumed) if "reward" in m] == [2, 3]
    for section in ("trained", "optimizer", "pushed"):
        name = f"checkpoints/step_000004/{section}.safetensors"
        want, got = load_file(async_run / name), load_file(resumed / name)
        assert want.keys() == got.keys() and all(torch.equal(want[k], got[k]) for k in want), section
