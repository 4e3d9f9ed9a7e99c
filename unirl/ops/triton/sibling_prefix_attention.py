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
import triton.language as tl
from torch import Tensor

from unirl.ops._attention_layout import adjacent, empty_like
from unirl.ops.triton import on_device_of_first

HEAD_SIZES = (64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


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


@triton.jit
def _dot(left, right):
    # float32 products in float32, not in the shorter tf32 that Triton would pick.
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _attend(
    accumulator,
    largest,
    total,
    query,
    key_pointer,
    value_pointer,
    key_token_stride,
    value_token_stride,
    first,
    end,
    scale_log2,
    masked: tl.constexpr,
    head_size: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """One tile of keys ``first .. first + tile_keys``, of which those before ``end`` exist."""
    tokens = first + tl.arange(0, tile_keys)
    columns = tl.arange(0, head_size)
    key_at = key_pointer + tokens.to(tl.int64)[None, :] * key_token_stride + columns[:, None]
    value_at = value_pointer + tokens.to(tl.int64)[:, None] * value_token_stride + columns[None, :]
    if masked:
        key = tl.load(key_at, mask=tokens[None, :] < end, other=0.0)
        value = tl.load(value_at, mask=tokens[:, None] < end, other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    scores = _dot(query, key) * scale_log2
    if masked:
        scores = tl.where(tokens[None, :] < end, scores, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - now_largest[:, None])
    rescale = tl.exp2(largest - now_largest)
    total = total * rescale + tl.sum(weights, 1)
    accumulator = accumulator * rescale[:, None] + _dot(weights.to(value.dtype), value)
    return accumulator, now_largest, total


@triton.jit
def _attend_region(
    accumulator,
    largest,
    total,
    query,
    key_pointer,
    value_pointer,
    key_token_stride,
    value_token_stride,
    length,
    scale_log2,
    head_size: tl.constexpr,
    tile_keys: tl.constexpr,
):
    whole = length // tile_keys * tile_keys
    for first in range(0, whole, tile_keys):
        accumulator, largest, total = _attend(
            accumulator,
            largest,
            total,
            query,
            key_pointer,
            value_pointer,
            key_token_stride,
            value_token_stride,
            first,
            length,
            scale_log2,
            False,
            head_size,
            tile_keys,
        )
    if whole < length:
        accumulator, largest, total = _attend(
            accumulator,
            largest,
            total,
            query,
            key_pointer,
            value_pointer,
            key_token_stride,
            value_token_stride,
            whole,
            length,
            scale_log2,
            True,
            head_size,
            tile_keys,
        )
    return accumulator, largest, total


@triton.jit
def _place(size, tile: tl.constexpr):
    """(index of a tile, index of what is tiled): one grid axis, as the second is short of 2^16 programs."""
    tiles = tl.cdiv(size, tile)
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def _prefix_count(prefix_lengths, group, prefix_length, ragged: tl.constexpr):
    if ragged:
        asked = tl.load(prefix_lengths + group)
        count = tl.minimum(tl.maximum(asked, 0), prefix_length).to(tl.int32)
    else:
        count = prefix_length
    return count


@triton.jit(do_not_specialize=["length", "prefix_length", "siblings"])
def forward_kernel(
    query,
    key,
    value,
    prefix_key,
    prefix_value,
    prefix_lengths,
    out,
    lse,
    query_strides,
    key_strides,
    value_strides,
    prefix_key_strides,
    prefix_value_strides,
    out_strides,
    length,
    prefix_length,
    siblings,
    scale_log2,
    key_heads: tl.constexpr,
    ratio: tl.constexpr,
    ragged: tl.constexpr,
    head_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Writes ``out`` ``[N, Hq, L, D]`` and the natural log-sum-exp ``lse`` ``[N, Hq, L]``."""
    tile, batch = _place(length * ratio, tile_rows)
    row = (batch // key_heads).to(tl.int64)
    key_head = (batch % key_heads).to(tl.int64)
    group = row // siblings
    folded = tile * tile_rows + tl.arange(0, tile_rows)
    token = (folded // ratio).to(tl.int64)
    head = key_head * ratio + folded % ratio
    exists = folded < length * ratio
    columns = tl.arange(0, head_size)

    query_at = query + row * query_strides[0] + head * query_strides[1] + token * query_strides[2]
    rows = tl.load(query_at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
    accumulator = tl.zeros([tile_rows, head_size], tl.float32)
    largest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    count = _prefix_count(prefix_lengths, group, prefix_length, ragged)
    accumulator, largest, total = _attend_region(
        accumulator,
        largest,
        total,
        rows,
        prefix_key + group * prefix_key_strides[0] + key_head * prefix_key_strides[1],
        prefix_value + group * prefix_value_strides[0] + key_head * prefix_value_strides[1],
        prefix_key_strides[2],
        prefix_value_strides[2],
        count,
        scale_log2,
        head_size,
        tile_keys,
    )
    accumulator, largest, total = _attend_region(
        accumulator,
        largest,
        total,
        rows,
        key + row * key_strides[0] + key_head * key_strides[1],
        value + row * value_strides[0] + key_head * value_strides[1],
        key_strides[2],
        value_strides[2],
        length,
        scale_log2,
        head_size,
        tile_keys,
    )
    out_at = out + row * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    result = (accumulator / total[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + columns[None, :], result, mask=exists[:, None])
    lse_at = lse + (row * key_heads * ratio + head) * length + token
    tl.store(lse_at, (largest + tl.log2(total)) * _LN_2, mask=exists)


@triton.jit(do_not_specialize=["length"])
def delta_kernel(
    out,
    grad_out,
    delta,
    out_strides,
    grad_strides,
    length,
    query_heads: tl.constexpr,
    head_size: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Writes ``delta`` ``[N, Hq, L]``, the inner product of each output row with its gradient."""
    tile, batch = _place(length, tile_rows)
    row = (batch // query_heads).to(tl.int64)
    head = (batch % query_heads).to(tl.int64)
    position = tile * tile_rows + tl.arange(0, tile_rows)
    token = position.to(tl.int64)
    columns = tl.arange(0, head_size)[None, :]
    exists = position < length
    out_at = out + row * out_strides[0] + head * out_strides[1] + token[:, None] * out_strides[2] + columns
    grad_at = (
        grad_out + row * grad_strides[0] + head * grad_strides[1] + token[:, None] * grad_strides[2] + columns
    )
    left = tl.load(out_at, mask=exists[:, None], other=0.0).to(tl.float32)
    right = tl.load(grad_at, mask=exists[:, None], other=0.0).to(tl.float32)
    tl.store(delta + (row * query_heads + head) * length + token, tl.sum(left * right, 1), mask=exists)


@triton.jit
def _query_gradient(
    accumulator,
    query,
    grad,
    lse_log2,
    delta,
    key_pointer,
    value_pointer,
    key_token_stride,
    value_token_stride,
    first,
    end,
    scale_log2,
    masked: tl.constexpr,
    head_size: tl.constexpr,
    tile_keys: tl.constexpr,
):
    tokens = first + tl.arange(0, tile_keys)
    columns = tl.arange(0, head_size)
    key_at = key_pointer + tokens.to(tl.int64)[None, :] * key_token_stride + columns[:, None]
    value_at = value_pointer + tokens.to(tl.int64)[None, :] * value_token_stride + columns[:, None]
    if masked:
        key = tl.load(key_at, mask=tokens[None, :] < end, other=0.0)
        value = tl.load(value_at, mask=tokens[None, :] < end, other=0.0)
    else:
        key = tl.load(key_at)
        value = tl.load(value_at)
    weights = tl.exp2(_dot(query, key) * scale_log2 - lse_log2[:, None])
    if masked:
        weights = tl.where(tokens[None, :] < end, weights, 0.0)
    grad_scores = weights * (_dot(grad, value) - delta[:, None])
    return accumulator + _dot(grad_scores.to(key.dtype), tl.trans(key))


@triton.jit
def _query_gradient_region(
    accumulator,
    query,
    grad,
    lse_log2,
    delta,
    key_pointer,
    value_pointer,
    key_token_stride,
    value_token_stride,
    length,
    scale_log2,
    head_size: tl.constexpr,
    tile_keys: tl.constexpr,
):
    whole = length // tile_keys * tile_keys
    for first in range(0, whole, tile_keys):
        accumulator = _query_gradient(
            accumulator,
            query,
            grad,
            lse_log2,
            delta,
            key_pointer,
            value_pointer,
            key_token_stride,
            value_token_stride,
            first,
            length,
            scale_log2,
            False,
            head_size,
            tile_keys,
        )
    if whole < length:
        accumulator = _query_gradient(
            accumulator,
            query,
            grad,
            lse_log2,
            delta,
            key_pointer,
            value_pointer,
            key_token_stride,
            value_token_stride,
            whole,
            length,
            scale_log2,
            True,
            head_size,
            tile_keys,
        )
    return accumulator


@triton.jit(do_not_specialize=["length", "prefix_length", "siblings"])
def query_gradient_kernel(
    query,
    key,
    value,
    prefix_key,
    prefix_value,
    prefix_lengths,
    grad_out,
    lse,
    delta,
    grad_query,
    query_strides,
    key_strides,
    value_strides,
    prefix_key_strides,
    prefix_value_strides,
    grad_strides,
    grad_query_strides,
    length,
    prefix_length,
    siblings,
    scale,
    key_heads: tl.constexpr,
    ratio: tl.constexpr,
    ragged: tl.constexpr,
    head_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Writes the gradient of ``query`` ``[N, Hq, L, D]``."""
    tile, batch = _place(length * ratio, tile_rows)
    row = (batch // key_heads).to(tl.int64)
    key_head = (batch % key_heads).to(tl.int64)
    group = row // siblings
    folded = tile * tile_rows + tl.arange(0, tile_rows)
    token = (folded // ratio).to(tl.int64)
    head = key_head * ratio + folded % ratio
    exists = folded < length * ratio
    columns = tl.arange(0, head_size)

    query_at = query + row * query_strides[0] + head * query_strides[1] + token * query_strides[2]
    rows = tl.load(query_at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
    grad_at = grad_out + row * grad_strides[0] + head * grad_strides[1] + token * grad_strides[2]
    grad = tl.load(grad_at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
    per_row = (row * key_heads * ratio + head) * length + token
    lse_log2 = tl.load(lse + per_row, mask=exists, other=0.0) * _LOG2_E
    row_delta = tl.load(delta + per_row, mask=exists, other=0.0)
    accumulator = tl.zeros([tile_rows, head_size], tl.float32)
    scale_log2 = scale * _LOG2_E
    count = _prefix_count(prefix_lengths, group, prefix_length, ragged)
    accumulator = _query_gradient_region(
        accumulator,
        rows,
        grad,
        lse_log2,
        row_delta,
        prefix_key + group * prefix_key_strides[0] + key_head * prefix_key_strides[1],
        prefix_value + group * prefix_value_strides[0] + key_head * prefix_value_strides[1],
        prefix_key_strides[2],
        prefix_value_strides[2],
        count,
        scale_log2,
        head_size,
        tile_keys,
    )
    accumulator = _query_gradient_region(
        accumulator,
        rows,
        grad,
        lse_log2,
        row_delta,
        key + row * key_strides[0] + key_head * key_strides[1],
        value + row * value_strides[0] + key_head * value_strides[1],
        key_strides[2],
        value_strides[2],
        length,
        scale_log2,
        head_size,
        tile_keys,
    )
    target = grad_query + row * grad_query_strides[0] + head * grad_query_strides[1]
    target_at = target + token * grad_query_strides[2]
    result = (accumulator * scale).to(grad_query.dtype.element_ty)
    tl.store(target_at[:, None] + columns[None, :], result, mask=exists[:, None])


@triton.jit(do_not_specialize=["length", "num_keys", "rows_per_share", "rows_per_batch"])
def key_gradient_kernel(
    query,
    key,
    value,
    key_lengths,
    grad_out,
    lse,
    delta,
    grad_key,
    grad_value,
    query_strides,
    key_strides,
    value_strides,
    grad_strides,
    grad_key_strides,
    grad_value_strides,
    length,
    num_keys,
    rows_per_batch,
    rows_per_share,
    scale,
    key_heads: tl.constexpr,
    ratio: tl.constexpr,
    shares: tl.constexpr,
    ragged: tl.constexpr,
    head_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
):
    """Writes gradients of keys and values ``[B * shares, Hk, num_keys, D]``.

    Batch ``b`` is a group's prefix, read by the ``rows_per_batch`` siblings of the group, or a sibling's own keys,
    read by it alone. Share ``s`` of a batch sums over siblings ``s * rows_per_share`` and the following ones.
    """
    key_tile, place = _place(num_keys, tile_keys)
    batch = (place // (key_heads * shares)).to(tl.int64)
    share = place // key_heads % shares
    key_head = (place % key_heads).to(tl.int64)
    positions = key_tile * tile_keys + tl.arange(0, tile_keys)
    tokens = positions.to(tl.int64)
    columns = tl.arange(0, head_size)
    end = _prefix_count(key_lengths, batch, num_keys, ragged)
    visible = positions < end

    key_at = key + batch * key_strides[0] + key_head * key_strides[1] + tokens * key_strides[2]
    value_at = value + batch * value_strides[0] + key_head * value_strides[1] + tokens * value_strides[2]
    keys = tl.load(key_at[:, None] + columns[None, :], mask=visible[:, None], other=0.0)
    values = tl.load(value_at[:, None] + columns[None, :], mask=visible[:, None], other=0.0)
    key_sum = tl.zeros([tile_keys, head_size], tl.float32)
    value_sum = tl.zeros([tile_keys, head_size], tl.float32)
    scale_log2 = scale * _LOG2_E

    first_row = share * rows_per_share
    last_row = tl.minimum(first_row + rows_per_share, rows_per_batch)
    tiles_per_row = tl.cdiv(length * ratio, tile_rows)
    num_tiles = tl.maximum(last_row - first_row, 0) * tiles_per_row
    if key_tile * tile_keys >= end:
        num_tiles = 0
    for tile in range(num_tiles):
        row = batch * rows_per_batch + first_row + tile // tiles_per_row
        folded = (tile % tiles_per_row) * tile_rows + tl.arange(0, tile_rows)
        token = (folded // ratio).to(tl.int64)
        head = key_head * ratio + folded % ratio
        exists = folded < length * ratio
        query_at = query + row * query_strides[0] + head * query_strides[1] + token * query_strides[2]
        grad_at = grad_out + row * grad_strides[0] + head * grad_strides[1] + token * grad_strides[2]
        rows = tl.load(query_at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
        grad = tl.load(grad_at[:, None] + columns[None, :], mask=exists[:, None], other=0.0)
        per_row = (row * key_heads * ratio + head) * length + token
        lse_log2 = tl.load(lse + per_row, mask=exists, other=float("inf")) * _LOG2_E
        row_delta = tl.load(delta + per_row, mask=exists, other=0.0)
        # Rows that do not exist have weight 2^-inf; keys that do not exist are never stored.
        weights = tl.exp2(_dot(keys, tl.trans(rows)) * scale_log2 - lse_log2[None, :])
        value_sum += _dot(weights.to(grad.dtype), grad)
        grad_scores = weights * (_dot(values, tl.trans(grad)) - row_delta[None, :])
        key_sum += _dot(grad_scores.to(rows.dtype), rows)

    key_sum = tl.where(visible[:, None], key_sum * scale, 0.0)
    value_sum = tl.where(visible[:, None], value_sum, 0.0)
    target = batch * shares + share
    stored = positions < num_keys
    grad_key_at = grad_key + target * grad_key_strides[0] + key_head * grad_key_strides[1]
    grad_key_at += tokens[:, None] * grad_key_strides[2] + columns[None, :]
    grad_value_at = grad_value + target * grad_value_strides[0] + key_head * grad_value_strides[1]
    grad_value_at += tokens[:, None] * grad_value_strides[2] + columns[None, :]
    tl.store(grad_key_at, key_sum.to(grad_key.dtype.element_ty), mask=stored[:, None])
    tl.store(grad_value_at, value_sum.to(grad_value.dtype.element_ty), mask=stored[:, None])


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
        scale * _LOG2_E.value,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
            targets = (grads[3], grads[4])
        else:
            shape = (groups * shares, key_heads, prefix_length, head_size)
            targets = tuple(torch.empty(shape, dtype=torch.float32, device=query.device) for _ in range(2))
        _key_gradients(
            query, prefix_key, prefix_value, prefix_lengths, *common, *targets, siblings, shares, scale
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
