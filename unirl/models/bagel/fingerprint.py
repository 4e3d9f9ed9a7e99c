# SPDX-License-Identifier: Apache-2.0
"""What the transformer was given for a group, as named integers and as a 128-bit digest.

Everything is read off the tensors that went into the model, never off the plan they were made from, so that a
side which plans right and feeds wrong is found out too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from unirl.models.bagel.context import Contexts
from unirl.ops import layout_digest


def group_fields(
    contexts: Contexts,
    group: int,
    *,
    marker_ids: Tensor,
    latent_position_ids: Tensor,
    latent_shape: tuple[int, ...],
) -> dict[str, Tensor]:
    """Name to int64 ``[n]`` of one group: its built contexts, then the denoised block.

    Args:
        contexts: what :func:`build_contexts` returned.
        group: index of the group in them.
        marker_ids: ids ``[2]`` around the denoised latents.
        latent_position_ids: rows of the latent position table ``[L]`` that go into every step.
        latent_shape: ``(z, h, w)`` of the denoised latent image.
    """
    device = latent_position_ids.device
    fields: dict[str, Tensor] = {}
    for name, context in contexts.by_name.items():
        fields[f"{name}.kv_len"] = torch.tensor([context.lengths[group]], device=device)
        fields[f"{name}.rope_offset"] = context.rope_offsets[group : group + 1]
        for field, value in context.fields[group].items():
            fields[f"{name}.{field}"] = value
    fields["seq_len"] = torch.tensor([latent_position_ids.shape[0] + marker_ids.shape[0]], device=device)
    fields["image_shape"] = torch.tensor(latent_shape, device=device)
    fields["marker_ids"] = marker_ids
    fields["latent_position_ids"] = latent_position_ids
    return fields


def digest(groups: list[Mapping[str, Tensor]]) -> Tensor:
    """Digests int64 ``[G, 2]`` on the device of the fields, without waiting for it.

    Every field enters with its length, so that values cannot move from one field to the next unseen.
    """
    values: list[Tensor] = []
    offsets = [0]
    for fields in groups:
        device = next(iter(fields.values())).device
        lengths = torch.tensor([field.shape[0] for field in fields.values()], device=device)
        row = torch.cat((lengths, *fields.values()))
        values.append(row)
        offsets.append(offsets[-1] + row.shape[0])
    return layout_digest(torch.cat(values), offsets)
