# SPDX-License-Identifier: Apache-2.0
"""A BAGEL of random weights: what a benchmark of speed needs of a model."""

from __future__ import annotations

import dataclasses

import torch

from unirl.models.bagel import Bagel, BagelStage, preset
from unirl.models.bagel.layers import PositionEmbedding
from unirl.models.bagel.tokenizer import ByteTokenizer


def random_stage(
    name: str, device: str, num_layers: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> BagelStage:
    """A stage of the preset's dimensions, of fewer layers if asked; it decodes no images.

    The weights are drawn where they are used: on the host that would take minutes for the large preset.
    """
    config = preset(name)
    if num_layers is not None:
        config = config.replace(language=dataclasses.replace(config.language, num_hidden_layers=num_layers))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Bagel(config).eval().requires_grad_(False).to(dtype)
    model.to_empty(device=device)
    for weight_name, weight in model.named_parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.02)
        else:
            weight.fill_(float("norm" in weight_name))
    for module in model.modules():
        if isinstance(module, PositionEmbedding):
            module.reset_parameters()
    return BagelStage(model, codec=None, tokenizer=ByteTokenizer())  # type: ignore[arg-type]
