# SPDX-License-Identifier: Apache-2.0
"""The native kernels of packing, and the tensors that they fill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from unirl.ops import _native


def pad(rows: list[Tensor], bound: int) -> Tensor:
    """Return rows ``[K, seq_i, C]`` as ``[N, K, bound, C]``, zeros behind; pinned when all rows are."""
    first = rows[0]
    num_frames, _, channels = first.shape
    pinned = not first.is_cuda and _are_pinned(rows)
    padded = first.new_empty((len(rows), num_frames, bound, channels), pin_memory=pinned)
    _move("pad_latents", rows, padded, padded.device)
    return padded


def trim(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Cut ``[N, K, S, C]`` into rows ``[K, lengths[i], C]``, each in memory of its own; pinned when latents are."""
    rows = _empty_rows(latents, lengths)
    _move("trim_latents", latents, rows, latents.device)
    return rows


def _move(name: str, source: Any, target: Any, device: torch.device) -> None:
    """Run a kernel; on copies where a tensor of the source has no memory or a token's values lie apart."""
    if _run(name, source, target, device):
        return
    whole = _whole(source) if isinstance(source, Tensor) else [_whole(row) for row in source]
    if not _run(name, whole, target, device):
        raise ValueError("packing was given a tensor without memory, which only stands for another one")


def _whole(tensor: Tensor) -> Tensor:
    """Contiguous and in memory, where a tensor that stands for zeros is not."""
    return tensor.clone() if tensor._is_zerotensor() else tensor.contiguous()


def _run(name: str, source: Any, target: Any, device: torch.device) -> bool:
    """Run a kernel on the device's stream or on torch's threads; false, and nothing is done, where it cannot."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            return getattr(_native.kernels(), f"cuda_{name}")(source, target, stream)
    return getattr(_native.kernels(), name)(source, target, _native.num_threads())


def _are_pinned(rows: list[Tensor]) -> bool:
    filled = [row for row in rows if row.numel()]  # an empty row lies nowhere
    return bool(filled) and all(row.is_pinned() for row in filled)


def _empty_rows(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    # The host's time decides here, and it makes a tensor like another in two thirds of the time of one from sizes.
    _, num_frames, _, channels = latents.shape
    element = latents.new_empty(1)

    def template(length: int) -> Tensor:
        shape = (num_frames, length, channels)
        # What is like an expanded tensor is contiguous, but one without elements keeps its strides of 0.
        return element.expand(shape) if min(shape) else latents.new_empty(shape)

    templates = {length: template(length) for length in {*lengths}}
    pinned = not latents.is_cuda and latents.is_pinned()
    make = partial(torch.empty_like, pin_memory=True) if pinned else torch.empty_like
    return list(map(make, map(templates.__getitem__, lengths)))
