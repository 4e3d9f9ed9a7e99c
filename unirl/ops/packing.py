# SPDX-License-Identifier: Apache-2.0
"""Rows of different length to one right-padded tensor and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends


def pad_latents(rows: Sequence[Tensor], pad_to: int | None = None, *, backend: str | None = None) -> Tensor:
    """Stack rows ``[K, seq_i, C]`` into ``[N, K, S, C]``, right-padded with zeros.

    Bits are copied, whatever the dtype; the gradient of each row is its part of the result's gradient. The result of
    rows in pinned memory is pinned.

    Args:
        rows: at least one tensor ``[K, seq_i, C]``; K, C, dtype and device are common, strides are free.
        pad_to: S; by default the longest row.
        backend: ``None`` (picked by device), ``"native"`` or ``"reference"``.

    Raises:
        ValueError: no rows, unequal K, C, dtype or device, or a row longer than ``pad_to``.
    """
    rows = list(rows)
    bound = check_rows(rows, pad_to)
    if _backends.pick("packing", rows[0].device, backend) == _backends.REFERENCE:
        return pad_latents_reference(rows, bound)
    return torch.ops.unirl.pad_latents(rows, bound)


def trim_latents(
    latents: Tensor, lengths: Sequence[int] | Tensor, *, backend: str | None = None
) -> list[Tensor]:
    """Cut ``[N, K, S, C]`` into N contiguous rows ``[K, lengths[i], C]``: the inverse of :func:`pad_latents`.

    The gradient of the padding is zero. Rows of pinned latents are pinned.

    Args:
        latents: ``[N, K, S, C]``, strides are free.
        lengths: N host integers from 0 to S. A device tensor is read back, which waits for the device.
        backend: ``None`` (picked by device), ``"native"`` or ``"reference"``.

    Raises:
        ValueError: another number of axes or of lengths, a length out of range.
    """
    counts = check_trim(latents, lengths)
    if not counts:
        return []
    if _backends.pick("packing", latents.device, backend) == _backends.REFERENCE:
        return trim_latents_reference(latents, counts)
    return torch.ops.unirl.trim_latents(latents, counts)


def check_rows(rows: Sequence[Tensor], pad_to: int | None) -> int:
    """Check the rows of a padding and return its bound S."""
    if not rows:
        raise ValueError("rows is empty; at least one row is needed to know K, C, dtype and device")
    if not _are_alike(rows):
        _say_what_differs(rows)
    longest = max(row.shape[1] for row in rows)
    if pad_to is None:
        return longest
    pad_to = arguments.check_integer("pad_to", pad_to)
    if longest > pad_to:
        index = next(i for i, row in enumerate(rows) if row.shape[1] > pad_to)
        raise ValueError(f"rows[{index}] has {rows[index].shape[1]} tokens, more than pad_to = {pad_to}")
    return pad_to


def _are_alike(rows: Sequence[Tensor]) -> bool:
    """Whether all are ``[K, seq, C]`` of one K, C, dtype and device; asked for every row of every call."""
    first = rows[0]
    if not isinstance(first, Tensor) or first.ndim != 3:
        return False
    num_frames, _, channels = first.shape
    dtype, device = first.dtype, first.device
    for row in rows:
        if not isinstance(row, Tensor) or row.dtype is not dtype or row.device != device:
            return False
        shape = row.shape
        if len(shape) != 3 or shape[0] != num_frames or shape[2] != channels:
            return False
    return True


def _say_what_differs(rows: Sequence[Tensor]) -> None:
    for index, row in enumerate(rows):
        name = f"rows[{index}]"
        arguments.check_tensor(name, row)
        if row.ndim != 3:
            raise ValueError(f"{name} has {row.ndim} axes; expected [K, seq, C]")
        arguments.check_shape(
            name, row, (rows[0].shape[0], row.shape[1], rows[0].shape[2]), "[K, seq, C] of rows[0]"
        )
        arguments.check_dtype(name, row, (rows[0].dtype,))
        arguments.check_device(name, row, rows[0].device, "rows[0]")


def check_trim(latents: Tensor, lengths: Sequence[int] | Tensor) -> list[int]:
    """Check the arguments of a trimming and return the lengths as host integers."""
    arguments.check_tensor("latents", latents)
    if latents.ndim != 4:
        raise ValueError(f"latents has {latents.ndim} axes; expected [N, K, S, C]")
    counts = arguments.integers("lengths", lengths)
    if len(counts) != latents.shape[0]:
        raise ValueError(f"lengths has {len(counts)} values; latents has {latents.shape[0]} rows")
    for index, count in enumerate(counts):
        if not 0 <= count <= latents.shape[2]:
            raise ValueError(f"lengths[{index}] is {count}; allowed: 0 to {latents.shape[2]}")
    return counts


def pad_latents_reference(rows: Sequence[Tensor], bound: int) -> Tensor:
    """The plain PyTorch padding."""
    padded = []
    for row in rows:
        tail = row.new_zeros((row.shape[0], bound - row.shape[1], row.shape[2]))
        padded.append(torch.cat([row, tail], dim=1))
    return torch.stack(padded)


def trim_latents_reference(latents: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The plain PyTorch trimming."""
    return [
        latents[index, :, :length].clone(memory_format=torch.contiguous_format)
        for index, length in enumerate(lengths)
    ]
