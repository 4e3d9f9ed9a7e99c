# SPDX-License-Identifier: Apache-2.0
"""What `unirl sample` and `unirl export` do with the weights of a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from unirl.config import RunConfig, parse, read_recipe_file

if TYPE_CHECKING:
    import torch


def load_recipe(run_dir: str | os.PathLike[str]) -> RunConfig:
    """The resolved recipe of a run. Raises `ValueError` when the folder holds none, or one that cannot be read."""
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir} is no run directory: it has no config.yaml")
    return parse(RunConfig, read_recipe_file(path))


def find_checkpoint(run_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> Path:
    """The folder of `checkpoint`: a path, or a name in the run (`step_000010`). `ValueError` lists the run's when it is neither."""
    root = Path(run_dir) / "checkpoints"
    for path in (Path(checkpoint), root / checkpoint):
        if path.is_dir():
            return path
    held = ", ".join(path.name for path in sorted(root.glob("step_*"))) or "none"
    raise ValueError(
        f"--checkpoint is {str(checkpoint)!r}, which is no folder; checkpoints in {root}: {held}"
    )


def load_trained(
    model: torch.nn.Module,
    run_dir: str | os.PathLike[str],
    config: RunConfig,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Path:
    """Puts a run's trained weights into `model`; returns where they came from.

    That is `checkpoint`, or else the exported adapter, or else (full weights, or a run that has not ended)
    the newest checkpoint. Of a checkpoint of a run with an EMA the averaged weights are taken, as the export
    at a run's end does. Raises `ValueError` when there is none.
    """
    from unirl.train import lora
    from unirl.train.checkpoint import latest_checkpoint, load_checkpoint
    from unirl.train.trainable import trained_parameters

    adapter = Path(run_dir) / "adapter"
    if checkpoint is None and (adapter / lora.CONFIG_FILE).is_file():
        lora.load(model, adapter)
        return adapter
    if checkpoint is not None:
        path: Path | None = find_checkpoint(run_dir, checkpoint)
    else:
        path = latest_checkpoint(Path(run_dir) / "checkpoints")
    if path is None:
        raise ValueError(
            f"{run_dir} holds no trained weights: neither adapter/, which a run writes at its end, nor a checkpoint (save_interval)"
        )
    sections = load_checkpoint(path).sections
    lora.copy_named(
        sections["ema" if config.optim.ema.decay else "trained"], trained_parameters(model), str(path)
    )
    return path


def sample_images(
    run_dir: str | os.PathLike[str],
    *,
    prompt: str,
    num: int = 8,
    seed: int = 0,
    canvas: tuple[int, int] | None = None,
    steps: int | None = None,
    base: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> list[np.ndarray]:
    """`num` images of one prompt, uint8 `[H, W, C]`, sampled as the run's evaluations are.

    Args:
        canvas: (height, width) in pixels; the recipe's default canvas when None.
        steps: denoising steps; the recipe's when None.
        base: the weights before training.
        checkpoint: a checkpoint's folder, or its name in the run; by default see `load_trained`.

    Raises `ValueError` for a folder without a recipe or trained weights, a canvas that the model does not
    have, or a prompt that is too long.
    """
    from unirl.data import check_prompt
    from unirl.distributed.models import build_model, model_limits
    from unirl.metrics.samples import to_uint8
    from unirl.types import STREAM_EVAL, Canvas, NoiseRecipe, Part, Sample, SamplingParams, check_canvases

    check_prompt(prompt, "--prompt")
    config = load_recipe(run_dir)
    if canvas is not None:
        limits, asked = model_limits(config), Canvas(*canvas)
        stride, side = limits.pixel_stride, limits.max_side
        check_canvases(["asked"], [asked], asked, pixel_stride=stride, max_side=side, key="--canvas")
    model, stage = build_model(config)
    if not base:
        load_trained(model, run_dir, config, checkpoint)
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


def export_adapter(
    run_dir: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the run's adapter to `target`, through the run's own model, so that a name or shape that does
    not fit is found here.

    The folder is plain peft's: `adapter_config.json` and `adapter_model.safetensors` under the public module
    names. Raises `ValueError` when `target` holds files already, or the run trained full weights.
    """
    from unirl.distributed.models import build_model
    from unirl.train import lora

    folder = Path(target)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--to {folder} exists and is not empty; allowed: a new or an empty folder")
    config = load_recipe(run_dir)
    if config.model.train != "lora":
        raise ValueError(
            f"{run_dir} trained model.train: {config.model.train}; only an adapter (model.train: lora) is exported"
        )
    model, _ = build_model(config)
    load_trained(model, run_dir, config, checkpoint)
    return lora.export(model, folder)
