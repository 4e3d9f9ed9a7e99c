# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.layout_digest`` and ``tensor_digest``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.digest import (
    TILE_WORDS,
    layout_digest_rows_reference,
    tensor_digest_reference,
    tensor_header,
)

_BATCH_BYTES = 4 * 8 * TILE_WORDS
"""Bytes that a warp of the CUDA kernel takes at a time: four tiles."""
_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define("unirl::layout_digest", "(Tensor values, Tensor? offsets) -> Tensor", tags=_TAGS)
torch.library.define("unirl::tensor_digest", "(Tensor[] tensors) -> Tensor", tags=_TAGS)


def _row_layout(values: Tensor, offsets: Tensor | None) -> tuple[Tensor, int, int, int]:
    """(values with contiguous rows, number of rows, row size, row stride)."""
    if offsets is not None:
        return values.contiguous(), offsets.shape[0] - 1, 0, 0
    rows = _native.contiguous_rows(values)
    return rows, rows.shape[0], rows.shape[1], rows.stride(0)


@torch.library.impl("unirl::layout_digest", "cpu")
def _layout_digest_cpu(values: Tensor, offsets: Tensor | None) -> Tensor:
    if default_backend("digest", "cpu") == REFERENCE:
        return layout_digest_rows_reference(values, offsets)
    rows, num_rows, row_size, stride = _row_layout(values, offsets)
    bounds = None if offsets is None else offsets.contiguous()
    out = torch.empty((num_rows, 2), dtype=torch.int64)
    _native.kernels().layout_digest(
        rows.data_ptr(),
        num_rows,
        row_size,
        stride,
        _native.address(bounds),
        out.data_ptr(),
        _native.num_threads(),
    )
    return out


@torch.library.impl("unirl::layout_digest", "cuda")
def _layout_digest_cuda(values: Tensor, offsets: Tensor | None) -> Tensor:
    if default_backend("digest", "cuda") == REFERENCE:
        return layout_digest_rows_reference(values, offsets)
    rows, num_rows, row_size, stride = _row_layout(values, offsets)
    bounds = None if offsets is None else offsets.to(values.device).contiguous()
    out = values.new_empty((num_rows, 2))
    with torch.cuda.device(values.device):
        _native.kernels().cuda_layout_digest(
            rows.data_ptr(),
            num_rows,
            row_size,
            stride,
            _native.address(bounds),
            out.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
    return out


@torch.library.register_fake("unirl::layout_digest")
def _layout_digest_fake(values: Tensor, offsets: Tensor | None) -> Tensor:
    num_rows = values.shape[0] if offsets is None else offsets.shape[0] - 1
    return values.new_empty((num_rows, 2))


@torch.library.impl("unirl::tensor_digest", "cpu")
def _tensor_digest_cpu(tensors: Sequence[Tensor]) -> Tensor:
    if default_backend("digest", "cpu") == REFERENCE:
        return torch.stack([tensor_digest_reference(tensor) for tensor in tensors])
    whole = [tensor.contiguous() for tensor in tensors]
    out = torch.empty((len(whole), 2), dtype=torch.int64)
    inputs = [
        (tensor.data_ptr(), tensor.numel() * tensor.element_size(), *tensor_header(tensor))
        for tensor in whole
    ]
    _native.kernels().tensor_digest(inputs, out.data_ptr(), _native.num_threads())
    return out


def _table(tensors: Sequence[Tensor]) -> np.ndarray:
    """The rows of the CUDA kernel's table, int64 ``[M, 6]``: address, bytes, two header words, first batch, batches.

    The device may be waiting: a column at a time takes the host less than a row at a time.
    """
    table = np.empty((len(tensors), 6), dtype=np.int64)
    table[:, 0] = [tensor.data_ptr() for tensor in tensors]
    table[:, 1] = [tensor.nbytes for tensor in tensors]
    table[:, 2:4] = [tensor_header(tensor) for tensor in tensors]
    table[:, 5] = -(-table[:, 1] // _BATCH_BYTES)
    table[:, 4] = np.cumsum(table[:, 5]) - table[:, 5]
    return table


@torch.library.impl("unirl::tensor_digest", "cuda")
def _tensor_digest_cuda(tensors: Sequence[Tensor]) -> Tensor:
    if default_backend("digest", "cuda") == REFERENCE:
        return torch.stack([tensor_digest_reference(tensor) for tensor in tensors])
    whole = [tensor.contiguous() for tensor in tensors]
    table = _table(whole)
    num_batches = int(table[-1, 4] + table[-1, 5])
    device = whole[0].device
    # From pinned memory the copy queues up like a kernel; from other memory the host would wait for the device.
    entries = torch.from_numpy(table).pin_memory().to(device, non_blocking=True)
    # The word behind the sums counts finished blocks.
    sums = torch.zeros(2 * len(whole) + 1, dtype=torch.int64, device=device)
    out = torch.empty((len(whole), 2), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _native.kernels().cuda_tensor_digest(
            entries.data_ptr(),
            len(whole),
            num_batches,
            sums.data_ptr(),
            out.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )
    return out


@torch.library.register_fake("unirl::tensor_digest")
def _tensor_digest_fake(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty((len(tensors), 2), dtype=torch.int64)
