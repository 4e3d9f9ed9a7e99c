# SPDX-License-Identifier: Apache-2.0
"""A dataset without canvases is a dataset in which every row names the default one: the same bytes from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unirl.config import RunConfig, parse
from unirl.train.stored_rollout import find_rollout, load_rollout

PROMPTS = ("a handwritten three", "seven", "the digit nine")


@pytest.mark.slow
def test_a_dataset_without_canvases_gives_the_bytes_of_one_with_the_default_on_every_row(
    ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    from unirl.trainer.diffusion import DiffusionTrainer

    folders = []
    for name, metadata in (("plain", {}), ("named", {"canvas": [12, 8]})):
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"prompt": p, "metadata": metadata}) + "\n" for p in PROMPTS))
        recipe = {
            "run_dir": str(tmp_path / name),
            "num_rollouts": 2,
            "batch_size": 3,
            "samples_per_prompt": 2,
            "parity": {"store_interval": 1},
            "model": {"path": str(random_base), "lora": {"rank": 2, "alpha": 2}},
            "sampling": {"height": 12, "width": 8, "num_inference_steps": 3},
            "optim": {"lr": 0.01},
            "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
            "data": {"train": {"path": str(data)}},
            "logging": {"console": "plain", "tensorboard": False},
        }
        folders.append(DiffusionTrainer(parse(RunConfig, recipe)).run())
    for rollout in (0, 1):
        one, other = (load_rollout(find_rollout(folder, rollout)).rows for folder in folders)
        assert one.canvases() == other.canvases() == [(12, 8)] * 6
        for column, tensor in one.segment.tensors().items():
            assert tensor.numpy().tobytes() == other.segment.tensors()[column].numpy().tobytes(), column
        for column in ("fingerprints", "rewards", "advantages"):
            assert getattr(one, column).numpy().tobytes() == getattr(other, column).numpy().tobytes(), column
    adapters = [(folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert adapters[0] == adapters[1]
