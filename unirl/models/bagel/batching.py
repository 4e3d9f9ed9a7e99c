# SPDX-License-Identifier: Apache-2.0
"""Which rows go through the model together: one canvas, and groups of equally many siblings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl.models.bagel.codec import Codec
from unirl.models.bagel.context import ContextRequest, SourceImage
from unirl.models.bagel.layout import Layout, plan_layout
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.source import image_key, source_pixels
from unirl.models.bagel.tokenizer import Tokenizer
from unirl.types import Canvas, Part


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows that go through the model together.

    Attributes:
        rows: their places in the Part, siblings of a group contiguous.
        siblings: rows a group.
        requests: one a group.
        positions: rows of the latent position table ``[L]``, on the device.
    """

    rows: list[int]
    siblings: int
    requests: list[ContextRequest]
    positions: Tensor

    @property
    def layout(self) -> Layout:
        """A layout of the batch; canvas and grid are the same in all."""
        return self.requests[0].layout


def plan_batches(part: Part, model: Bagel, codec: Codec, tokenizer: Tokenizer) -> list[RowBatch]:
    """Batches of all rows, groups in the order of their first row.

    Rows of one group that differ in prompt, source or canvas become groups of their own: nothing is assumed
    of where
    siblings stand or how many they are.
    """
    images: Sequence[np.ndarray | None] = part.images or (None,) * len(part)
    keys: dict[int, bytes] = {}
    groups: dict[Hashable, list[int]] = {}
    for row, (group, prompt, image, canvas) in enumerate(
        zip(part.group_ids, part.prompts, images, part.canvases(), strict=True)
    ):
        if image is not None and id(image) not in keys:
            keys[id(image)] = image_key(image)
        key = (group, prompt, None if image is None else keys[id(image)], canvas)
        groups.setdefault(key, []).append(row)
    alike: dict[tuple[Canvas, int], list[tuple[list[int], ContextRequest]]] = {}
    sources: dict[bytes, SourceImage] = {}
    for (_, prompt, key, canvas), rows in groups.items():
        source = None
        if key is not None:
            if key not in sources:
                sources[key] = _read_source(images[rows[0]], key, model, codec)
            source = sources[key]
        sizes = source and (tuple(source.vae_pixels.shape[1:]), tuple(source.vit_pixels.shape[1:]))
        layout = plan_layout(model.config, tokenizer.encode(prompt), canvas, sizes, row=part.ids[rows[0]])
        alike.setdefault((canvas, len(rows)), []).append((rows, ContextRequest(layout, source)))
    return [
        RowBatch(
            rows=[row for rows, _ in members for row in rows],
            siblings=siblings,
            requests=[request for _, request in members],
            positions=members[0][1].layout.latent_position_ids().to(model.device),
        )
        for (_, siblings), members in alike.items()
    ]


def in_row_order(results: Sequence[Tensor], batches: Sequence[RowBatch]) -> Tensor:
    """Concatenate the batches' results and put them back where their rows stood."""
    if len(batches) == 1 and batches[0].rows == sorted(batches[0].rows):
        return results[0]
    order = torch.tensor([row for batch in batches for row in batch.rows])
    return torch.cat(list(results))[torch.argsort(order).to(results[0].device)]


def _read_source(image: np.ndarray, key: bytes, model: Bagel, codec: Codec) -> SourceImage:
    vae_pixels, vit_pixels = (pixels.to(model.device) for pixels in source_pixels(model.config, image))
    return SourceImage(codec.encode(vae_pixels[None])[0], vit_pixels, key, vae_pixels)
