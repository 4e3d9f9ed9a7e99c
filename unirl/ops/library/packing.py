# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.pad_latents`` and ``trim_latents``, each the other's backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.packing import pad_latents_reference, trim_latents_reference

_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define("unirl::pad_latents", "(Tensor[] rows, SymInt bound) -> Tensor", tags=_TAGS)
torch.library.define("unirl::trim_latents", "(Tensor latents, SymInt[] lengths) -> Tensor[]", tags=_TAGS)


def _with_whole_tokens(tensor: Tensor) -> Tensor:
    """Return ``tensor`` ``[..., seq, C]`` when the values of a token are adjacent, else a contiguous copy."""
    return tensor if tensor.is_contiguous() or tensor.stride(-1) == 1 else tensor.contiguous()


def _packed(row: Tensor) -> tuple[int, int, int, int]:
    """(address, frame stride, token stride, length) of a row ``[K, seq, C]``, strides in bytes."""
    size, (frame, token, _) = row.element_size(), row.stride()
    return row.data_ptr(), frame * size, token * size, row.shape[1]


def _padded(latents: Tensor) -> tuple[int, int, int, int]:
    """(address, row stride, frame stride, token stride) of ``[N, K, S, C]``, strides in bytes."""
    size = latents.element_size()
    return latents.data_ptr(), latents.stride(0) * size, latents.stride(1) * size, latents.stride(2) * size


@torch.library.impl("unirl::pad_latents", "cpu")
def _pad_latents_cpu(rows: Sequence[Tensor], bound: int) -> Tensor:
    if default_backend("packing", "cpu") == REFERENCE:
        return pad_latents_reference(rows, bound)
    whole = [_with_whole_tokens(row) for row in rows]
    num_frames, _, channels = rows[0].shape
    filled = [row for row in rows if row.numel()]  # an empty row lies nowhere
    pinned = bool(filled) and all(row.is_pinned() for row in filled)
    out = torch.empty((len(rows), num_frames, bound, channels), dtype=rows[0].dtype, pin_memory=pinned)
    _native.kernels().pad_latents(
        [_packed(row) for row in whole],
        _padded(out),
        num_frames,
        bound,
        channels * out.element_size(),
        _native.num_threads(),
    )
    return out


@torch.library.impl("unirl::pad_latents", "cuda")
def _pad_latents_cuda(rows: Sequence[Tensor], bound: int) -> Tensor:
    if default_backend("packing", "cuda") == REFERENCE:
        return pad_latents_reference(rows, bound)
    whole = [_with_whole_tokens(row) for row in rows]
    num_frames, _, channels = rows[0].shape
    out = rows[0].new_empty((len(rows), num_frames, bound, channels))
    with torch.cuda.device(out.device):
        _native.kernels().cuda_pad_latents(
            [_packed(row) for row in whole],
            _padded(out),
            num_frames,
            bound,
            channels * out.element_size(),
            torch.cuda.current_stream().cuda_stream,
        )
    return out


@torch.library.register_fake("unirl::pad_latents")
def _pad_latents_fake(rows: Sequence[Tensor], bound: int) -> Tensor:
    return rows[0].new_empty((len(rows), rows[0].shape[0], bound, rows[0].shape[2]))


@torch.library.impl("unirl::trim_latents", "cpu")
def _trim_latents_cpu(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    if default_backend("packing", "cpu") == REFERENCE:
        return trim_latents_reference(latents, lengths)
    whole = _with_whole_tokens(latents)
    _, num_frames, _, channels = latents.shape
    pinned = latents.is_pinned()
    rows = [
        torch.empty((num_frames, length, channels), dtype=latents.dtype, pin_memory=pinned)
        for length in lengths
    ]
    _native.kernels().trim_latents(
        [_packed(row) for row in rows],
        _padded(whole),
        num_frames,
        channels * latents.element_size(),
        _native.num_threads(),
    )
    return rows


@torch.library.impl("unirl::trim_latents", "cuda")
def _trim_latents_cuda(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    if default_backend("packing", "cuda") == REFERENCE:
        return trim_latents_reference(latents, lengths)
    whole = _with_whole_tokens(latents)
    _, num_frames, _, channels = latents.shape
    rows = [latents.new_empty((num_frames, length, channels)) for length in lengths]
    with torch.cuda.device(latents.device):
        _native.kernels().cuda_trim_latents(
            [_packed(row) for row in rows],
            _padded(whole),
            num_frames,
            channels * latents.element_size(),
            torch.cuda.current_stream().cuda_stream,
        )
    return rows


@torch.library.register_fake("unirl::trim_latents")
def _trim_latents_fake(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return [latents.new_empty((latents.shape[1], length, latents.shape[3])) for length in lengths]


def _pad_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.lengths = [row.shape[1] for row in inputs[0]]


def _pad_backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None]:
    return torch.ops.unirl.trim_latents(grad, ctx.lengths), None


def _trim_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.bound = inputs[0].shape[2]
    ctx.shape = inputs[0].shape


def _trim_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor, None]:
    return torch.ops.unirl.pad_latents(grads, ctx.bound), None


torch.library.register_autograd("unirl::pad_latents", _pad_backward, setup_context=_pad_context)
torch.library.register_autograd("unirl::trim_latents", _trim_backward, setup_context=_trim_context)
