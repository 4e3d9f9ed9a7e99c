# SPDX-License-Identifier: Apache-2.0
"""The attention made of torch's own kernels: siblings folded into the query axis, two parts merged by log-sum-exp.

Without a mask, one call of G sequences whose queries are those of all siblings covers the prefix, and one call of N
sequences covers the own keys; neither copies a prefix. Backward calls the stock backward of each part with the
*merged* output and log-sum-exp, which makes the weights those of the joint softmax; the prefix's gradients come
out summed over siblings. A query is copied once, to fold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_CUDA_DTYPES = (torch.bfloat16, torch.float16)
_CUDNN_HEAD_SIZES = (64, 128)


def why_unsupported(query: Tensor, prefix_lengths: Tensor | None) -> str | None:
    """Return what torch's kernels do not take, or ``None``."""
    allowed = _CUDA_DTYPES if query.device.type == "cuda" else _CPU_DTYPES
    if query.device.type not in ("cpu", "cuda"):
        return f"no kernels for {query.device.type}"
    if query.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        return f"dtype {str(query.dtype).removeprefix('torch.')}; allowed on {query.device.type}: {names}"
    if query.device.type == "cuda" and query.shape[3] % 8:
        return f"head size {query.shape[3]}; allowed on cuda: multiples of 8"
    if prefix_lengths is not None:
        return "prefix_lengths; allowed: None, as these kernels take no ragged prefix without a mask"
    return None


def _uses_cudnn(query: Tensor) -> bool:
    capable = torch.cuda.get_device_capability(query.device)[0] >= 9
    return capable and query.shape[3] in _CUDNN_HEAD_SIZES and torch.backends.cudnn.is_available()


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Stock attention ``[B, H, S, D]`` and its log-sum-exp ``[B, H, S]``."""
    aten = torch.ops.aten
    if query.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
    elif _uses_cudnn(query):
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, scale=scale)
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    return out, lse.reshape(query.shape[:3])


def _attend_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, False, scale=scale
        )
    # The kernels' dropout state, which nothing reads without dropout.
    state: Any = torch.zeros(2, dtype=torch.int64, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    if _uses_cudnn(query):
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out,
            query,
            key,
            value,
            out,
            lse.unsqueeze(-1),
            state[0],
            state[1],
            None,
            *lengths,
            0.0,
            False,
            scale=scale,
        )
    state = state.to(torch.uint64)
    return aten._scaled_dot_product_flash_attention_backward(
        grad_out, query, key, value, out, lse, *lengths, 0.0, False, state, state[:0], scale=scale
    )


def _fold(tensor: Tensor, key_heads: int) -> Tensor:
    """``[N, Hq, L, ...]`` to ``[N, Hk, Hq / Hk L, ...]``: the heads of one key head become tokens."""
    return tensor.reshape(tensor.shape[0], key_heads, -1, *tensor.shape[3:])


def _to_groups(folded: Tensor, groups: int) -> Tensor:
    """``[N, Hk, S, ...]`` to ``[G, Hk, N / G S, ...]``: siblings become tokens too."""
    split = folded.reshape(groups, -1, *folded.shape[1:]).transpose(1, 2)
    return split.reshape(groups, folded.shape[1], -1, *folded.shape[3:])


def _from_groups(grouped: Tensor, num_rows: int) -> Tensor:
    """The inverse of :func:`_to_groups`."""
    groups, heads = grouped.shape[:2]
    split = grouped.reshape(groups, heads, num_rows // groups, -1, *grouped.shape[3:]).transpose(1, 2)
    return split.reshape(num_rows, heads, -1, *grouped.shape[3:])


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention ``[N, Hq, L, D]`` and its natural log-sum-exp ``[N, Hq, L]``."""
    if query.numel() == 0:
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=_lse_dtype(query))
    folded = _fold(query, key.shape[1])
    out, lse = _attend(folded, key, value, scale)
    if prefix_key.shape[2]:
        groups = prefix_key.shape[0]
        grouped = _attend(_to_groups(folded, groups), prefix_key, prefix_value, scale)
        prefix_out, prefix_lse = (_from_groups(part, query.shape[0]) for part in grouped)
        merged = torch.logaddexp(lse, prefix_lse)
        own = torch.exp(lse - merged).unsqueeze(-1) * out
        out = (own + torch.exp(prefix_lse - merged).unsqueeze(-1) * prefix_out).to(query.dtype)
        lse = merged
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


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
    """Gradients of query, key, value, prefix_key and prefix_value."""
    if query.numel() == 0:
        return tuple(map(torch.zeros_like, (query, key, value, prefix_key, prefix_value)))  # type: ignore[return-value]
    heads = key.shape[1]
    # cuDNN wants the output and its gradient in one layout.
    folded = [_fold(tensor, heads).contiguous() for tensor in (grad_out, query, out, lse)]
    upstream, rows, result, sums = folded
    grad_query, grad_key, grad_value = _attend_backward(upstream, rows, key, value, result, sums, scale)
    if prefix_key.shape[2] == 0:
        prefix_grads = torch.zeros_like(prefix_key), torch.zeros_like(prefix_value)
    else:
        groups = prefix_key.shape[0]
        upstream, rows, result, sums = (_to_groups(tensor, groups).contiguous() for tensor in folded)
        grad_rows, *rest = _attend_backward(upstream, rows, prefix_key, prefix_value, result, sums, scale)
        wide = _lse_dtype(query)
        grad_query = grad_query.to(wide) + _from_groups(grad_rows, query.shape[0]).to(wide)
        prefix_grads = rest[0], rest[1]
    return grad_query.reshape(query.shape).to(query.dtype), grad_key, grad_value, *prefix_grads


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype is torch.float64 else torch.float32
