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
    if not _run("pad_latents", padded.device, rows, padded):
        _run("pad_latents", padded.device, [row.contiguous() for row in rows], padded)
    return padded


def trim(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Cut ``[N, K, S, C]`` into rows ``[K, lengths[i], C]``, each in memory of its own; pinned when latents are."""
    rows = _empty_rows(latents, lengths)
    if not _run("trim_latents", latents.device, latents, rows):
        _run("trim_latents", latents.device, latents.contiguous(), rows)
    return rows


def _run(name: str, device: torch.device, source: Any, target: Any) -> bool:
    """Run a kernel on the device's stream or on torch's threads; false if the values of a token lie apart."""
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
