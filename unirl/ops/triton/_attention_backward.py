# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of the attention: the query's gradient, and the gradients of keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from unirl.ops.triton._attention_forward import LOG2_E, dot, place_of, prefix_count


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
    tile, batch = place_of(length, tile_rows)
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
    weights = tl.exp2(dot(query, key) * scale_log2 - lse_log2[:, None])
    if masked:
        weights = tl.where(tokens[None, :] < end, weights, 0.0)
    grad_scores = weights * (dot(grad, value) - delta[:, None])
    return accumulator + dot(grad_scores.to(key.dtype), tl.trans(key))


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
    tile, batch = place_of(length * ratio, tile_rows)
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
    lse_log2 = tl.load(lse + per_row, mask=exists, other=0.0) * LOG2_E
    row_delta = tl.load(delta + per_row, mask=exists, other=0.0)
    accumulator = tl.zeros([tile_rows, head_size], tl.float32)
    scale_log2 = scale * LOG2_E
    count = prefix_count(prefix_lengths, group, prefix_length, ragged)
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
    key_tile, place = place_of(num_keys, tile_keys)
    batch = (place // (key_heads * shares)).to(tl.int64)
    share = place // key_heads % shares
    key_head = (place % key_heads).to(tl.int64)
    positions = key_tile * tile_keys + tl.arange(0, tile_keys)
    tokens = positions.to(tl.int64)
    columns = tl.arange(0, head_size)
    end = prefix_count(key_lengths, batch, num_keys, ragged)
    visible = positions < end

    key_at = key + batch * key_strides[0] + key_head * key_strides[1] + tokens * key_strides[2]
    value_at = value + batch * value_strides[0] + key_head * value_strides[1] + tokens * value_strides[2]
    keys = tl.load(key_at[:, None] + columns[None, :], mask=visible[:, None], other=0.0)
    values = tl.load(value_at[:, None] + columns[None, :], mask=visible[:, None], other=0.0)
    key_sum = tl.zeros([tile_keys, head_size], tl.float32)
    value_sum = tl.zeros([tile_keys, head_size], tl.float32)
    scale_log2 = scale * LOG2_E

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
        lse_log2 = tl.load(lse + per_row, mask=exists, other=float("inf")) * LOG2_E
        row_delta = tl.load(delta + per_row, mask=exists, other=0.0)
        # Rows that do not exist have weight 2^-inf; keys that do not exist are never stored.
        weights = tl.exp2(dot(keys, tl.trans(rows)) * scale_log2 - lse_log2[None, :])
        value_sum += dot(weights.to(grad.dtype), grad)
        grad_scores = weights * (dot(values, tl.trans(grad)) - row_delta[None, :])
        key_sum += dot(grad_scores.to(rows.dtype), rows)

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
