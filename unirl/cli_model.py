# SPDX-License-Identifier: Apache-2.0
"""What `unirl sample` and `unirl export` do with the weights of a run directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from unirl.config import RunConfig, parse


def load_recipe(run_dir: str | os.PathLike[str]) -> RunConfig:
    """The resolved recipe of a run. Raises `ValueError` when the folder holds none."""
    import yaml

    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir} is no run directory: it has no config.yaml")
    return parse(RunConfig, yaml.safe_load(path.read_text(encoding="utf-8")))


def find_adapter(run_dir: str | os.PathLike[str]) -> Path:
    """The exported adapter of a finished run. Raises `ValueError` when there is none (yet)."""
    from unirl.train.lora import CONFIG_FILE

    folder = Path(run_dir) / "adapter"
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{run_dir} holds no exported adapter ({folder}); a run writes it at its end")
    return folder


def sample_images(
    run_dir: str | os.PathLike[str],
    *,
    prompt: str,
    num: int = 8,
    seed: int = 0,
    canvas: tuple[int, int] | None = None,
    steps: int | None = None,
    base: bool = False,
) -> list[np.ndarray]:
    """`num` images of one prompt, uint8 `[H, W, C]`, sampled as the run's evaluations are.

    Args:
        canvas: (height, width) in pixels; the recipe's default canvas when None.
        steps: denoising steps; the recipe's when None.
        base: the weights before training.

    Raises `ValueError` for a folder without a recipe or trained weights, or a canvas that the model does not have.
    """
    from unirl.distributed.models import build_model
    from unirl.metrics.samples import to_uint8
    from unirl.train import lora
    from unirl.types import STREAM_EVAL, NoiseRecipe, Part, Sample, SamplingParams

    config = load_recipe(run_dir)
    adapter = None if base else find_adapter(run_dir)
    model, stage = build_model(config, rollout_only=True)
    if adapter is not None:
        lora.load(model, adapter)
    sampling = config.sampling
    height, width = canvas or (sampling.height, sampling.width)
    params = SamplingParams(
        height=height,
        width=width,
        num_inference_steps=steps or sampling.num_inference_steps,
        eta=config.eval.eta,
        rule=sampling.rule,
        noise=NoiseRecipe(seed, stream=STREAM_EVAL),
        guidance_scale=sampling.guidance_scale,
        cfg_img_scale=sampling.cfg_img_scale,
        cfg_interval=sampling.cfg_interval,
        cfg_renorm_type=sampling.cfg_renorm_type,
        cfg_renorm_min=sampling.cfg_renorm_min,
        shift=sampling.shift,
        trajectory_dtype=sampling.trajectory_dtype,
    )
    rows = Part(ids=("sample.p0",), prompts=(prompt,), metadata=({},), params=params)
    media = stage.sample(Sample((rows,)).fork(num, params).frontier).media
    assert media is not None
    return [to_uint8(image) for image in media]


def export_adapter(run_dir: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Copies the run's adapter to `target` after loading it into the run's model, so that a broken one is found here.

    The folder is plain peft's: `adapter_config.json` and `adapter_model.safetensors` under the public module names.
    Raises `ValueError` when `target` holds files already.
    """
    from unirl.distributed.models import build_model
    from unirl.train import lora

    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--to {folder} exists and is not empty; allowed: a new or an empty folder")
    config = load_recipe(run_dir)
    adapter = find_adapter(run_dir)
    model, _ = build_model(config, rollout_only=True)
    lora.load(model, adapter)
    return lora.export(model, folder)
