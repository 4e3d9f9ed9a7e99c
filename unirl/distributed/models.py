# SPDX-License-Identifier: Apache-2.0
"""From `model` in the recipe to weights on a device."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from unirl.config import RunConfig
from unirl.models.bagel import PRESETS, Bagel, BagelConfig, BagelStage, check_weights, preset
from unirl.train.lora import check_targets
from unirl.train.trainable import prepare

ASSETS = Path(__file__).resolve().parent.parent / "assets"


@dataclasses.dataclass(frozen=True)
class ModelLimits:
    """What can be known of a model without its weights. `max_side` in tokens; `active_params` work on one image token."""

    pixel_stride: int
    max_side: int
    active_params: int
    hidden_size: int
    intermediate_size: int


def weights_folder(config: RunConfig) -> Path:
    """The folder the weights come from. `ValueError` names the setting when there is none."""
    if config.model.path is not None:
        return Path(config.model.path)
    shipped = ASSETS / config.model.preset
    if not shipped.is_dir():
        raise ValueError(
            f"model.path is not set, and no weights of {config.model.preset!r} are shipped with the package; set model.path to a "
            "folder in the public layout"
        )
    return shipped


def model_config(config: RunConfig) -> BagelConfig:
    """The preset's dimensions; `ValueError` for an unknown preset."""
    if config.model.preset not in PRESETS:
        raise ValueError(f"model.preset is {config.model.preset!r}; allowed: {', '.join(sorted(PRESETS))}")
    dimensions = preset(config.model.preset)
    if config.model.batch_invariant is not None:
        dimensions = dimensions.replace(batch_invariant=config.model.batch_invariant)
    if config.parity.bitwise and not dimensions.batch_invariant:
        raise ValueError(
            f"parity.bitwise is true, but the preset {config.model.preset} is not batch-invariant; set model.batch_invariant: true "
            "or parity.bitwise: false"
        )
    return dimensions


def pick_device(config: RunConfig) -> str:
    """`cuda` where there is one, else `cpu`; `ValueError` for a recipe that asks what the device cannot do."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.parity.bitwise and device == "cpu":
        asked = "parity.bitwise is true"
        if config.model.dtype != "float32":
            raise ValueError(
                f"{asked}, but model.dtype is {config.model.dtype}, whose products round by the size of the batch on a CPU; set "
                "model.dtype: float32, or parity.bitwise: false"
            )
        if config.threads_per_worker != 1:
            raise ValueError(
                f"{asked}, but threads_per_worker is {config.threads_per_worker}: how work is cut between threads may move last "
                "bits; set threads_per_worker: 1, or parity.bitwise: false"
            )
    return device


def model_limits(config: RunConfig) -> ModelLimits:
    """Limits of the recipe's model."""
    dimensions = model_config(config)
    language = dimensions.language
    attention = (
        2
        * language.hidden_size
        * (language.num_attention_heads + language.num_key_value_heads)
        * language.head_dim
    )
    per_layer = attention + 3 * language.hidden_size * language.intermediate_size
    return ModelLimits(
        pixel_stride=dimensions.pixel_stride,
        max_side=dimensions.max_latent_size,
        active_params=language.num_hidden_layers * per_layer,
        hidden_size=language.hidden_size,
        intermediate_size=language.intermediate_size,
    )


def check_model(config: RunConfig) -> None:
    """Raises `ValueError` when the weights are not there or are another model's, or the adapter's targets match nothing. Reads
    file headers only.
    """
    with torch.device("meta"):
        model = Bagel(model_config(config))
    if config.model.train == "lora":
        check_targets(model, config.model.lora.targets)
    folder = weights_folder(config)
    try:
        check_weights(model, folder)
    except ValueError as error:
        raise ValueError(
            f"model.path and model.preset {config.model.preset!r} do not go together: {error}"
        ) from None


def build_model(config: RunConfig, *, rollout_only: bool = False) -> tuple[Bagel, BagelStage]:
    """The model with its adapter or trainable weights, on this process's device, and its stage."""
    device = pick_device(config)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]
    stage = BagelStage.from_pretrained(
        weights_folder(config), model_config(config), device=device, dtype=dtype
    )
    prepare(stage.model, config.model, seed=config.seed)
    if rollout_only:
        stage.model.requires_grad_(False)
    return stage.model, stage
