# SPDX-License-Identifier: Apache-2.0
"""Calls of supported transformers, made up from their configuration: what ``unirl.accelerate(check=True)`` runs.

Values are random and the same in every process. There are two prompts, so that the check sees siblings that are
given another group's prompt or mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_GROUPS, _PROMPT_TOKENS, _PATCHES = 2, 8, 4


def _pixart_inputs(target: Any, siblings: int) -> dict[str, Any]:
    config, rows = target.config, _GROUPS * siblings
    side = _PATCHES * config.patch_size
    prompts = _drawn(
        target, 1, _GROUPS, _PROMPT_TOKENS, config.caption_channels or config.cross_attention_dim
    )
    device = prompts.device
    lengths = torch.tensor([_PROMPT_TOKENS, _PROMPT_TOKENS // 2], device=device)
    mask = torch.arange(_PROMPT_TOKENS, device=device) < lengths[:, None]
    extras: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if target.use_additional_conditions:
        size = torch.full((rows, 2), 8.0 * side, device=device, dtype=prompts.dtype)
        extras = {"resolution": size, "aspect_ratio": torch.ones_like(size[:, :1])}
    return {
        "hidden_states": _drawn(target, 2, rows, config.in_channels, side, side),
        "encoder_hidden_states": prompts.repeat_interleave(siblings, 0),
        "encoder_attention_mask": mask.to(prompts.dtype).repeat_interleave(siblings, 0),
        "timestep": torch.arange(rows, device=device) * 97 % 1000,
        "added_cond_kwargs": extras,
        "return_dict": False,
    }


def _wan_inputs(target: Any, siblings: int) -> dict[str, Any]:
    config, rows = target.config, _GROUPS * siblings
    frames, height, width = config.patch_size
    # With image tokens, the layers take the last 512 tokens for the text.
    tokens = 512 if config.added_kv_proj_dim is not None else _PROMPT_TOKENS
    prompts = _drawn(target, 1, _GROUPS, tokens, config.text_dim)
    made = {
        "hidden_states": _drawn(
            target, 2, rows, config.in_channels, frames, _PATCHES * height, _PATCHES * width
        ),
        "encoder_hidden_states": prompts.repeat_interleave(siblings, 0),
        "timestep": torch.arange(rows, device=prompts.device) * 97 % 1000,
        "return_dict": False,
    }
    if config.image_dim is not None:
        images = 2 if config.pos_embed_seq_len is not None else 1
        image_tokens = config.pos_embed_seq_len or 257
        image = _drawn(target, 3, _GROUPS, image_tokens, config.image_dim).repeat_interleave(siblings, 0)
        made["encoder_hidden_states_image"] = image.reshape(
            rows * images, image_tokens // images, config.image_dim
        )
    return made


def _drawn(target: Any, seed: int, *shape: int) -> Tensor:
    parameter = next(target.parameters())
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device=parameter.device, dtype=target.dtype)


MAKE_INPUTS: dict[str, Callable[[nn.Module, int], dict[str, Any]]] = {
    "PixArtTransformer2DModel": _pixart_inputs,
    "WanTransformer3DModel": _wan_inputs,
}
"""From a family's class name to (transformer, siblings) -> keyword arguments of a call of two groups."""
