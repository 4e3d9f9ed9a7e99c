# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.pad_latents`` and ``trim_latents``, each the other's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.ops import _native_packing
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.packing import pad_latents_reference, trim_latents_reference

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define("unirl::pad_latents", "(Tensor[] rows, SymInt bound) -> Tensor", tags=_TAGS)
torch.library.define("unirl::trim_latents", "(Tensor latents, SymInt[] lengths) -> Tensor[]", tags=_TAGS)


@torch.library.impl("unirl::pad_latents", ("cpu", "cuda"))
def _pad_latents(rows: list[Tensor], bound: int) -> Tensor:
    if default_backend("packing", rows[0].device.type) == REFERENCE:
        return pad_latents_reference(rows, bound)
    return _native_packing.pad(rows, bound)


@torch.library.register_fake("unirl::pad_latents")
def _pad_latents_fake(rows: Sequence[Tensor], bound: int) -> Tensor:
    return rows[0].new_empty((len(rows), rows[0].shape[0], bound, rows[0].shape[2]))


@torch.library.impl("unirl::trim_latents", ("cpu", "cuda"))
def _trim_latents(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    if default_backend("packing", latents.device.type) == REFERENCE:
        return trim_latents_reference(latents, lengths)
    return _native_packing.trim(latents, lengths)


@torch.library.register_fake("unirl::trim_latents")
def _trim_latents_fake(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [latents.new_empty((latents.shape[1], length, latents.shape[3])) for length in lengths]


def _pad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.lengths = [row.shape[1] for row in inputs[0]]


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    return torch.ops.unirl.trim_latents(grad, ctx.lengths), None


def _trim_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.bound = inputs[0].shape[2]


def _trim_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, None]:
    return torch.ops.unirl.pad_latents(grads, ctx.bound), None


torch.library.register_autograd("unirl::pad_latents", _pad_backward, setup_context=_pad_context)
torch.library.register_autograd("unirl::trim_latents", _trim_backward, setup_context=_trim_context)
