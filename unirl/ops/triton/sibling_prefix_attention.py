# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the attention over a shared prefix and own keys: any GPU that Triton knows, float32 too.

A program owns a tile of query rows, the heads of one key head folded into it token by token, and walks over the
prefix of its group and then over its own keys. Only the last tile of each region is masked. Tile bounds depend on
L and the prefix length alone, so a row's bits do not depend on how many siblings or groups share the call.

Backward follows FlashAttention-2 (Dao 2023): weights are recomputed from the saved log-sum-exp, one kernel gives
the query's gradient, another the gradients of keys and values. A prefix tile sums over the siblings of its group
inside fixed shares, which are then added in order: no atomics, the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from unirl.ops._attention_backends import TRITON_DTYPES as DTYPES
from unirl.ops._attention_backends import TRITON_HEAD_SIZES as HEAD_SIZES
from unirl.ops._attention_layout import adjacent, empty_like
from unirl.ops.triton import on_device_of_first
from unirl.ops.triton._attention_backward import delta_kernel, key_gradient_kernel, query_gradient_kernel
from unirl.ops.triton._attention_forward import LOG2_E, forward_kernel


class Tiling(NamedTuple):
    """Rows and keys of a tile, warps of a program, tiles in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def forward_tiling(head_size: int, dtype: torch.dtype) -> Tiling:
    """Tiling of the forward kernel; float32 tiles are half as large in both directions."""
    if dtype is torch.float32:
        return Tiling(64, 32, 4, 2)
    return Tiling(128, 64, 8 if head_size == 128 else 4, 3)


def query_gradient_tiling(head_size: int, dtype: torch.dtype) -> Tiling:
    """Tiling of the kernel for the query's gradient."""
    if dtype is torch.float32:
        return Tiling(64, 32, 4, 1)
    return Tiling(128, 64, 8, 2 if head_size == 128 else 3)


def key_gradient_tiling(head_size: int, dtype: torch.dtype) -> Tiling:
    """Tiling of the kernel for the gradients of keys and values."""
    if dtype is torch.float32:
        return Tiling(32, 64, 4, 1)
    return Tiling(32 if head_size == 128 else 64, 128, 8, 3)


def supports(query: Tensor) -> str | None:
    """``None`` if the kernels take ``query`` ``[N, Hq, L, D]`` (and keys like it), else what they do not take."""
    if query.dtype not in DTYPES:
        return f"dtype {str(query.dtype).removeprefix('torch.')}; allowed: float32, bfloat16, float16"
    if query.shape[3] not in HEAD_SIZES:
        return f"head size {query.shape[3]}; allowed: {', '.join(map(str, HEAD_SIZES))}"
    return None


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


@on_device_of_first
def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
    *,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention ``[N, Hq, L, D]`` and its natural log-sum-exp, float32 ``[N, Hq, L]``.

    Shapes as in :func:`unirl.ops.sibling_prefix_attention`, ``prefix_lengths`` on the device or ``None``.
    """
    query, key, value, prefix_key, prefix_value = map(adjacent, (query, key, value, prefix_key, prefix_value))
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    out = empty_like(query)
    lse = torch.empty((num_rows, query_heads, length), dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    tiling = tiling or forward_tiling(head_size, query.dtype)
    ratio = query_heads // key_heads
    forward_kernel[(triton.cdiv(length * ratio, tiling.rows) * num_rows * key_heads,)](
        query,
        key,
        value,
        prefix_key,
        prefix_value,
        prefix_lengths,
        out,
        lse,
        _strides(query),
        _strides(key),
        _strides(value),
        _strides(prefix_key),
        _strides(prefix_value),
        _strides(out),
        length,
        prefix_length,
        num_rows // groups,
        scale * LOG2_E.value,
        key_heads=key_heads,
        ratio=ratio,
        ragged=prefix_lengths is not None,
        head_size=head_size,
        tile_rows=tiling.rows,
        tile_keys=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    return out, lse


@on_device_of_first
def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    out: Tensor,
    lse: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, prefix_key and prefix_value; prefix tokens that no row sees get zero."""
    query, key, value, prefix_key, prefix_value = map(adjacent, (query, key, value, prefix_key, prefix_value))
    grad_out, out = adjacent(grad_out), adjacent(out)
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    grads = tuple(empty_like(t) for t in (query, key, value, prefix_key, prefix_value))
    if query.numel() == 0:
        for grad in grads:
            grad.zero_()
        return grads
    ratio = query_heads // key_heads
    siblings = num_rows // groups
    delta = torch.empty_like(lse)
    delta_kernel[(triton.cdiv(length, 64) * num_rows * query_heads,)](
        out,
        grad_out,
        delta,
        _strides(out),
        _strides(grad_out),
        length,
        query_heads=query_heads,
        head_size=head_size,
        tile_rows=64,
        enable_fp_fusion=True,
    )
    tiling = query_gradient_tiling(head_size, query.dtype)
    query_gradient_kernel[(triton.cdiv(length * ratio, tiling.rows) * num_rows * key_heads,)](
        query,
        key,
        value,
        prefix_key,
        prefix_value,
        prefix_lengths,
        grad_out,
        lse,
        delta,
        grads[0],
        _strides(query),
        _strides(key),
        _strides(value),
        _strides(prefix_key),
        _strides(prefix_value),
        _strides(grad_out),
        _strides(grads[0]),
        length,
        prefix_length,
        siblings,
        scale,
        key_heads=key_heads,
        ratio=ratio,
        ragged=prefix_lengths is not None,
        head_size=head_size,
        tile_rows=tiling.rows,
        tile_keys=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    common = (grad_out, lse, delta)
    _key_gradients(query, key, value, None, *common, grads[1], grads[2], 1, 1, scale)
    if prefix_length:
        shares = prefix_shares(siblings, groups * key_heads, prefix_length, head_size, query.dtype)
        if shares == 1:
            targets = list(grads[3:])
        else:
            shape = (groups * shares, key_heads, prefix_length, head_size)
            targets = [torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2)]
        _key_gradients(
            query,
            prefix_key,
            prefix_value,
            prefix_lengths,
            *common,
            targets[0],
            targets[1],
            siblings,
            shares,
            scale,
        )
        if shares > 1:
            for grad, partial in zip(grads[3:], targets, strict=True):
                grad.copy_(partial.view(groups, shares, *partial.shape[1:]).sum(1))
    return grads


def prefix_shares(siblings: int, heads: int, prefix_length: int, head_size: int, dtype: torch.dtype) -> int:
    """Into how many shares the siblings of a group are cut when a prefix's gradient is summed.

    A short prefix has few tiles; with one program a tile most of the GPU would idle.
    """
    programs = triton.cdiv(prefix_length, key_gradient_tiling(head_size, dtype).keys) * heads
    wanted = max(1, 512 // programs)
    return triton.cdiv(siblings, triton.cdiv(siblings, min(wanted, siblings)))


def _key_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    rows_per_batch: int,
    shares: int,
    scale: float,
) -> None:
    _, query_heads, length, head_size = query.shape
    batches, key_heads, num_keys, _ = key.shape
    tiling = key_gradient_tiling(head_size, query.dtype)
    key_gradient_kernel[(triton.cdiv(num_keys, tiling.keys) * batches * shares * key_heads,)](
        query,
        key,
        value,
        key_lengths,
        grad_out,
        lse,
        delta,
        grad_key,
        grad_value,
        _strides(query),
        _strides(key),
        _strides(value),
        _strides(grad_out),
        _strides(grad_key),
        _strides(grad_value),
        length,
        num_keys,
        rows_per_batch,
        triton.cdiv(rows_per_batch, shares),
        scale,
        key_heads=key_heads,
        ratio=query_heads // key_heads,
        shares=shares,
        ragged=key_lengths is not None,
        head_size=head_size,
        tile_rows=tiling.rows,
        tile_keys=tiling.keys,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
