# SPDX-License-Identifier: Apache-2.0
"""The C++ attention over a shared prefix and own keys (CPU, float32, any head size)."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._attention_layout import adjacent, empty_like, headed

MAX_KEYS = 8192
"""Longest P + L: a task's packed keys and values stay in the cache."""


def why_unsupported(query: Tensor, prefix_key: Tensor) -> str | None:
    """Return what the kernel does not take, or ``None``."""
    if query.dtype is not torch.float32:
        return f"dtype {str(query.dtype).removeprefix('torch.')}; allowed: float32"
    if (keys := prefix_key.shape[2] + query.shape[2]) > MAX_KEYS:
        return f"{keys} keys a row; allowed: up to {MAX_KEYS}"
    return None


def _call(inputs: tuple[Tensor, ...], prefix_lengths: Tensor | None, scale: float) -> tuple[object, ...]:
    query, _, _, prefix_key, _ = inputs
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    return (
        [headed(tensor) for tensor in inputs],
        _native.address(prefix_lengths),
        [num_rows, groups, query_heads, key_heads, length, prefix_length, head_size],
        scale,
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention ``[N, Hq, L, D]`` and its natural log-sum-exp, float32 ``[N, Hq, L]``."""
    inputs = tuple(map(adjacent, (query, key, value, prefix_key, prefix_value)))
    counts = None if prefix_lengths is None else prefix_lengths.contiguous()
    out, lse = empty_like(query), torch.empty(query.shape[:3])
    _native.kernels().sibling_prefix_attention(
        *_call(inputs, counts, scale), headed(out), lse.data_ptr(), _native.num_threads()
    )
    return out, lse


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
    """Gradients of query, key, value, prefix_key and prefix_value, the last two summed over siblings in order."""
    inputs = tuple(map(adjacent, (query, key, value, prefix_key, prefix_value)))
    counts = None if prefix_lengths is None else prefix_lengths.contiguous()
    upstream, result, sums = adjacent(grad_out), adjacent(out), lse.contiguous()
    grads = tuple(map(empty_like, inputs))
    _native.kernels().sibling_prefix_attention_backward(
        *_call(inputs, counts, scale),
        headed(result),
        sums.data_ptr(),
        headed(upstream),
        [headed(grad) for grad in grads],
        _native.num_threads(),
    )
    return grads[0], grads[1], grads[2], grads[3], grads[4]
