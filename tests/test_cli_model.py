# SPDX-License-Identifier: Apache-2.0
"""`unirl sample` and `unirl export` on a run directory with a digits model of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from unirl.cli import main
from unirl.cli_model import load_recipe, sample_images
from unirl.config import RunConfig, parse, to_plain
from unirl.distributed.models import build_model
from unirl.train import lora
from unirl.train.checkpoint import save_checkpoint
from unirl.train.trainable import trained_parameters

PROMPT = "a handwritten three"


def fill(parameters: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def make_run(folder: Path, random_base: Path, **changes: object) -> RunConfig:
    """A run directory with a recipe and nothing else."""
    recipe = {
        "model": {"path": str(random_base), "lora": {"rank": 4, "alpha": 4, "targets": ["q_proj_moe_gen"]}},
        "sampling": {"height": 12, "width": 12, "num_inference_steps": 2},
        **changes,
    }
    config = parse(RunConfig, recipe)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    return config


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, random_base: Path) -> Path:
    """A finished run: an exported adapter, and a checkpoint of other weights."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    model, _ = build_model(make_run(folder, random_base))
    fill(lora.adapter_parameters(model), seed=2)
    lora.export(model, folder / "adapter")
    fill(lora.adapter_parameters(model), seed=3)
    save_checkpoint(folder / "checkpoints", 10, {"trained": lora.adapter_state(model)}, {})
    return folder


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def trained(run_dir: Path) -> list[np.ndarray]:
    """Three images of the finished run."""
    return sample_images(run_dir, prompt=PROMPT, num=3, seed=5)


def test_the_same_seed_gives_the_same_images_however_many_are_asked_for(
    run_dir: Path, trained: list[np.ndarray]
) -> None:
    assert len(trained) == 3 and all(
        image.shape == (12, 12, 1) and image.dtype == np.uint8 for image in trained
    )
    assert not np.array_equal(trained[0], trained[1])
    assert same(trained[:1], sample_images(run_dir, prompt=PROMPT, num=1, seed=5))
    assert not same(trained[:1], sample_images(run_dir, prompt=PROMPT, num=1, seed=6))


def test_trained_weights_base_weights_and_a_checkpoint_give_three_different_images(
    run_dir: Path, trained: list[np.ndarray]
) -> None:
    base = sample_images(run_dir, prompt=PROMPT, num=3, seed=5, base=True)
    saved = sample_images(
        run_dir, prompt=PROMPT, num=3, seed=5, checkpoint=run_dir / "checkpoints" / "step_000010"
    )
    assert not same(trained, base) and not same(trained, saved) and not same(base, saved)
    assert same(saved, sample_images(run_dir, prompt=PROMPT, num=3, seed=5, checkpoint="step_000010"))


@pytest.mark.parametrize(
    "arguments", [["sample", "--prompt", PROMPT], ["export", "--to", "{}/new"], ["parity"]]
)
def test_a_checkpoint_that_is_not_there_lists_those_that_are(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command, *options = [argument.format(tmp_path) for argument in arguments]
    assert main([command, str(run_dir), *options, "--checkpoint", "step_10"]) == 2
    said = capsys.readouterr().err
    assert "--checkpoint is 'step_10', which is no folder" in said and said.endswith(": step_000010\n")


def test_a_run_without_an_adapter_is_sampled_from_its_newest_checkpoint(
    tmp_path: Path, random_base: Path
) -> None:
    folder = tmp_path / "full"
    config = make_run(folder, random_base, model={"path": str(random_base), "train": "full"})
    with pytest.raises(ValueError, match="holds no trained weights"):
        sample_images(folder, prompt=PROMPT, num=1)
    model, _ = build_model(config)
    start = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    save_checkpoint(folder / "checkpoints", 1, {"trained": start}, {})
    untouched = sample_images(folder, prompt=PROMPT, num=1)
    assert same(untouched, sample_images(folder, prompt=PROMPT, num=1, base=True))
    save_checkpoint(folder / "checkpoints", 2, {"trained": {n: p * 1.5 for n, p in start.items()}}, {})
    assert not same(untouched, sample_images(folder, prompt=PROMPT, num=1))


def test_a_run_with_an_average_is_sampled_from_the_average_in_its_checkpoint(
    tmp_path: Path, random_base: Path
) -> None:
    folder = tmp_path / "averaged"
    model, _ = build_model(make_run(folder, random_base, optim={"ema": {"decay": 0.9}}))
    zeros = {name: torch.zeros_like(p) for name, p in lora.adapter_parameters(model).items()}
    fill(lora.adapter_parameters(model), seed=4)
    save_checkpoint(folder / "checkpoints", 1, {"trained": lora.adapter_state(model), "ema": zeros}, {})
    assert same(
        sample_images(folder, prompt=PROMPT, num=1), sample_images(folder, prompt=PROMPT, num=1, base=True)
    )


def test_sample_writes_a_picture_of_the_asked_canvas(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "grid.png"
    arguments = [
        "sample",
        str(run_dir),
        "--prompt",
        PROMPT,
        "--num",
        "2",
        "--canvas",
        "12",
        "8",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert Image.open(out).height >= 64
    assert sample_images(run_dir, prompt=PROMPT, num=1, canvas=(12, 8))[0].shape == (12, 8, 1)


def test_a_canvas_that_the_model_does_not_have_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(run_dir), "--prompt", PROMPT, "--canvas", "9", "8"]) == 2
    said = capsys.readouterr().err
    assert "pixel stride" in said and "change --canvas" in said


def test_a_prompt_that_is_too_long_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(run_dir), "--prompt", "a" * 16385]) == 2
    assert "--prompt: the prompt has 16385 bytes; allowed: at most 16384" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["sample", "--prompt", PROMPT, "--num", "1", "--out"], ["export", "--to"]]
)
def test_a_place_that_cannot_be_written_to_is_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command, *options = arguments
    assert main([command, str(run_dir), *options, "/dev/null/there.png"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "/dev/null" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter/adapter_model.safetensors", b"", "is damaged"),
        ("adapter/adapter_config.json", b"{", "is damaged: it is not JSON"),
        ("adapter/adapter_config.json", b"{}", "needs r, lora_alpha, target_modules"),
        ("config.yaml", b"a: [1", "is not the recipe that a run saved"),
        ("config.yaml", b"", "is not the recipe that a run saved"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    (folder / name).write_bytes(content)
    assert main(["sample", str(folder), "--prompt", PROMPT, "--num", "1"]) == 2
    said = capsys.readouterr().err
    assert f"{folder / name} " in said and message in said and said.count("\n") == 1


def test_an_exported_adapter_is_what_plain_peft_loads(
    run_dir: Path, tmp_path: Path, random_base: Path
) -> None:
    import peft

    folder = tmp_path / "exported"
    assert main(["export", str(run_dir), "--to", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
    exported, trained = (
        load_file(path / "adapter_model.safetensors") for path in (folder, run_dir / "adapter")
    )
    assert exported.keys() == trained.keys() and all(
        torch.equal(exported[name], trained[name]) for name in trained
    )
    config = load_recipe(run_dir)
    plain, _ = build_model(
        parse(RunConfig, {**to_plain(config), "model": {"path": str(random_base), "train": "full"}})
    )
    loaded = peft.PeftModel.from_pretrained(plain, str(folder))
    found = peft.get_peft_model_state_dict(loaded)
    assert found.keys() == trained.keys() and all(torch.equal(found[name], trained[name]) for name in trained)


def test_a_checkpoint_can_be_exported(run_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "exported"
    path = run_dir / "checkpoints" / "step_000010"
    assert main(["export", str(run_dir), "--to", str(folder), "--checkpoint", str(path)]) == 0
    exported, trained = (
        load_file(place / "adapter_model.safetensors") for place in (folder, run_dir / "adapter")
    )
    assert exported.keys() == trained.keys() and not any(
        torch.equal(exported[n], trained[n]) for n in trained
    )


def test_export_overwrites_nothing(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert main(["export", str(run_dir), "--to", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
