# SPDX-License-Identifier: Apache-2.0
"""Where rows are generated and trained changes nothing about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import metrics, recipe
from safetensors.torch import load_file

from unirl.trainer.async_diffusion import AsyncDiffusionTrainer
from unirl.trainer.diffusion import DiffusionTrainer

ONE_ROLLOUT = {"num_rollouts": 1, "batch_size": 3, "stack__num_updates_per_batch": 1, "data__eval": {}}


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def one_rank(ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DiffusionTrainer(recipe(random_base, tmp_path_factory.mktemp("one") / "run", **ONE_ROLLOUT)).run()


def test_another_number_of_rollout_ranks_gives_the_same_rows_bit_for_bit(
    one_rank: Path, random_base: Path, tmp_path: Path
) -> None:
    changes = {**ONE_ROLLOUT, "layout": "separate", "num_devices": 3, "train_fraction": 0.34}
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", **changes)).run()
    want, got = adapter(one_rank), adapter(run)
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert metrics(run)[0]["reward"] == metrics(one_rank)[0]["reward"]


@pytest.mark.slow
def test_uneven_training_ranks_take_the_same_step(one_rank: Path, random_base: Path, tmp_path: Path) -> None:
    """12 rows on 5 ranks in micros of 2: ranks have 3 or 2 rows, so 2 or 1 micros; the step is that of one rank."""
    changes = {**ONE_ROLLOUT, "num_devices": 5, "stack__micro_batch_size": 2}
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", **changes)).run()
    want, got = adapter(one_rank), adapter(run)
    for name in want:
        # One Adam step moves every weight by about lr in the direction of its gradient's sign, so rounding shows up to there.
        torch.testing.assert_close(got[name], want[name], atol=2e-4, rtol=1e-3)
    assert metrics(run)[0]["gn"] == pytest.approx(metrics(one_rank)[0]["gn"], rel=1e-4)


def test_fewer_rows_than_training_ranks_is_an_error_that_names_the_keys(
    random_base: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "batch_size": 1,
        "samples_per_prompt": 2,
        "num_devices": 5,
        "stack__num_updates_per_batch": 1,
    }
    with pytest.raises(ValueError, match=r"fewer rows than .*ranks.*batch_size or samples_per_prompt"):
        DiffusionTrainer(recipe(random_base, tmp_path / "run", **changes))


@pytest.mark.parametrize("reap_first", [True, False], ids=["reap_first", "launch_first"])
def test_a_transfer_by_the_rollout_actor_gives_the_same_rows(
    ray_cluster: None, one_rank: Path, random_base: Path, tmp_path: Path, reap_first: bool
) -> None:
    changes = {
        **ONE_ROLLOUT,
        "layout": "separate",
        "num_devices": 2,
        "transport_kind": "colocate_store",
        "reap_before_launch": reap_first,
    }
    run = AsyncDiffusionTrainer(recipe(random_base, tmp_path / "run", **changes)).run()
    want, got = adapter(one_rank), adapter(run)
    assert all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.slow
@pytest.mark.parametrize("ema", [0.0, 0.5], ids=["live", "averaged"])
def test_evaluations_change_nothing_about_training(
    ray_cluster: None, random_base: Path, tmp_path: Path, ema: float
) -> None:
    """With and without evaluations between rollouts, and with the averaged weights swapped in for them."""
    adapters = []
    for name, changes in {"quiet": {"data__eval": {}}, "watched": {"eval_interval": 1}}.items():
        config = recipe(random_base, tmp_path / name, optim__ema={"decay": ema}, **changes)
        run = DiffusionTrainer(config).run()
        adapters.append(load_file(run / "checkpoints" / "step_000003" / "trained.safetensors"))
    assert all(torch.equal(adapters[0][k], adapters[1][k]) for k in adapters[0])


@pytest.mark.slow
def test_full_weights_train_and_push_too(ray_cluster: None, random_base: Path, tmp_path: Path) -> None:
    changes = {
        **ONE_ROLLOUT,
        "num_rollouts": 2,
        "model__train": "full",
        "layout": "separate",
        "num_devices": 2,
    }
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", optim__lr=0.001, **changes)).run()
    assert [m["parity/abs_dlogp_max"] for m in metrics(run)] == [0.0, 0.0]
    moved = load_file(run / "checkpoints" / "step_000002" / "trained.safetensors")
    base = load_file(random_base / "model.safetensors")
    assert any(not torch.equal(moved[name], base[name]) for name in moved)
