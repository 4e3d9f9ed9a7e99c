# SPDX-License-Identifier: Apache-2.0
"""Rows of different length to one right-padded tensor and back, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends, _eager_packing, _native


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
    return _eager_packing.pad(rows, bound)


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
    return _eager_packing.trim(latents, counts)


def check_rows(rows: list[Tensor], pad_to: int | None) -> int:
    """Check the rows of a padding and return its bound S."""
    if not rows:
        raise ValueError("rows is empty; at least one row is needed to know K, C, dtype and device")
    longest = _longest(rows)
    if pad_to is None:
        return longest
    pad_to = arguments.check_integer("pad_to", pad_to)
    if longest > pad_to:
        index = next(i for i, row in enumerate(rows) if row.shape[1] > pad_to)
        raise ValueError(f"rows[{index}] has {rows[index].shape[1]} tokens, more than pad_to = {pad_to}")
    return pad_to


def _longest(rows: list[Tensor]) -> int:
    """Return the largest seq of rows ``[K, seq, C]``; raise unless they have K, C, dtype and device in common."""
    if _native.extension is not None and not torch.compiler.is_compiling():
        longest = _native.extension.longest_row(rows, Tensor)
        if longest >= 0:
            return longest
    _check_alike(rows)
    return max(row.shape[1] for row in rows)


def _check_alike(rows: Sequence[Tensor]) -> None:
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
    if isinstance(lengths, list) and {*map(type, lengths)} == {int}:
        counts = lengths  # the usual case, without a look at each by itself
    else:
        counts = arguments.integers("lengths", lengths)
    if len(counts) != latents.shape[0]:
        raise ValueError(f"lengths has {len(counts)} values; latents has {latents.shape[0]} rows")
    if counts and not 0 <= min(counts) <= max(counts) <= latents.shape[2]:
        index = next(i for i, count in enumerate(counts) if not 0 <= count <= latents.shape[2])
        raise ValueError(f"lengths[{index}] is {counts[index]}; allowed: 0 to {latents.shape[2]}")
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
