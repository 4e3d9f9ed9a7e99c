# SPDX-License-Identifier: Apache-2.0
"""What the transformer is given for a group, as named integers.

Everything is read off the tensors that go into the model, never off the plan they were made from, so that a
side which plans right and feeds wrong is found out too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.models.bagel.context import Context, Contexts
from unirl.types import LayoutRecord


def group_layout(
    contexts: Contexts,
    group: int,
    *,
    marker_ids: Tensor,
    latent_position_ids: Tensor,
    canvas: tuple[int, int],
) -> LayoutRecord:
    """The record of one group: each context that was built, then the denoised block.

    For the contexts ``gen``, ``cfg_text`` and ``cfg_img``: ``kv_len`` (keys and values that the denoised block
    sees), ``rope_offset`` (its rotary position), and of the prefill ``token_ids``, ``position_ids``,
    ``image_shapes`` (pixels or latents that went in) and ``source_pixels`` (128-bit digests of them). For the
    denoised block: ``canvas``, ``seq_len``, ``marker_ids`` and ``latent_position_ids``.

    Args:
        contexts: what :func:`build_contexts` returned.
        group: index of the group in them.
        marker_ids: ids ``[2]`` around the denoised latents.
        latent_position_ids: rows of the latent position table ``[L]`` that go into every step.
        canvas: height and width in pixels.
    """
    device = latent_position_ids.device
    fields: dict[str, Tensor] = {}
    for name, context in contexts.by_name.items():
        fields[f"{name}.kv_len"] = _seen_length(context, group)
        fields[f"{name}.rope_offset"] = context.rope_offsets[group : group + 1]
        for field, value in context.fields[group].items():
            fields[f"{name}.{field}"] = value
    fields["canvas"] = torch.tensor([canvas[0], canvas[1]], device=device)
    fields["seq_len"] = torch.tensor([latent_position_ids.shape[0] + marker_ids.shape[0]], device=device)
    fields["marker_ids"] = marker_ids
    fields["latent_position_ids"] = latent_position_ids
    return LayoutRecord.of(fields)


def _seen_length(context: Context, group: int) -> Tensor:
    """int64 ``[1]``: keys and values that the attention reads of a group's prefix."""
    if context.prefix_lengths is not None:
        return context.prefix_lengths[group : group + 1].long()
    return torch.tensor([context.layers[0].key.shape[2]], device=context.rope_offsets.device)
