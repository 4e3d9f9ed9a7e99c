# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the attention, and what the backward kernels share with it."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def dot(left, right):
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
    scores = dot(query, key) * scale_log2
    if masked:
        scores = tl.where(tokens[None, :] < end, scores, float("-inf"))
    now_largest = tl.maximum(largest, tl.max(scores, 1))
    weights = tl.exp2(scores - now_largest[:, None])
    rescale = tl.exp2(largest - now_largest)
    total = total * rescale + tl.sum(weights, 1)
    accumulator = accumulator * rescale[:, None] + dot(weights.to(value.dtype), value)
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
def place_of(size, tile: tl.constexpr):
    """(index of a tile, index of what is tiled): one grid axis, as the second is short of 2^16 programs."""
    tiles = tl.cdiv(size, tile)
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def prefix_count(prefix_lengths, group, prefix_length, ragged: tl.constexpr):
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
    accumulator = tl.zeros([tile_rows, head_size], tl.float32)
    largest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    count = prefix_count(prefix_lengths, group, prefix_length, ragged)
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
