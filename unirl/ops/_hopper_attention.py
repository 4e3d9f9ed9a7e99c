# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel of the attention over a shared prefix and own keys (Hopper, compute capability 9.0)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from unirl.ops import _native

HEAD_SIZES = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_RATIO = 64
_ALIGNMENT_BYTES = 16


@cache
def why_missing(device_index: int) -> str | None:
    """Return what the kernel lacks on a CUDA device, or ``None``."""
    if reason := _native.why_missing("cuda"):
        return reason
    major, minor = torch.cuda.get_device_capability(device_index)
    if (major, minor) != (9, 0):
        return f"it needs compute capability 9.0 (H100, H200, H20), this device has {major}.{minor}"
    return None


def why_unsupported(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, scale: float
) -> str | None:
    """Return which argument the kernel does not take and why, or ``None``."""
    if query.dtype not in DTYPES:
        return f"dtype {str(query.dtype).removeprefix('torch.')}; allowed: bfloat16, float16"
    if query.shape[3] not in HEAD_SIZES:
        return f"head size {query.shape[3]}; allowed: {', '.join(map(str, HEAD_SIZES))}"
    if query.shape[1] > MAX_RATIO * key.shape[1]:
        return f"{query.shape[1]} query heads for {key.shape[1]} key heads; allowed: {MAX_RATIO} for each"
    if not scale > 0:
        return f"scale {scale}; allowed: above 0"
    for name, tensor in (
        ("key", key),
        ("value", value),
        ("prefix_key", prefix_key),
        ("prefix_value", prefix_value),
    ):
        if not is_copyable(tensor):
            return f"the memory layout of {name}; allowed: see is_copyable"
    return None


def is_copyable(tensor: Tensor) -> bool:
    """Whether the tensor copy engine can read ``[rows, heads, tokens, D]`` in place: values of a head adjacent,
    address and strides multiples of 16 bytes, no repeated axis. Token-major and head-major layouts of the
    usual head sizes qualify, and so do the views of :class:`unirl.ops.SiblingKV`.
    """
    if tensor.numel() == 0:
        return True
    size = tensor.element_size()
    strides = [
        stride for stride, count in zip(tensor.stride()[:3], tensor.shape[:3], strict=True) if count > 1
    ]
    aligned = all(stride > 0 and stride * size % _ALIGNMENT_BYTES == 0 for stride in strides)
    return tensor.stride(3) == 1 and aligned and tensor.data_ptr() % _ALIGNMENT_BYTES == 0


def _headed(tensor: Tensor) -> tuple[int, int, int, int]:
    """(address, row stride, head stride, token stride) of ``[rows, heads, tokens, D]``, strides in elements."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention ``[N, Hq, L, D]`` and its natural log-sum-exp, float32 ``[N, Hq, L]``.

    Callers have asked :func:`why_missing` and :func:`why_unsupported`. ``prefix_lengths`` is int64 on the
    device or ``None``. A query that the copy engine cannot read is copied; keys and values never are.
    """
    if not is_copyable(query):
        query = query.contiguous()
    num_rows, query_heads, length, head_size = query.shape
    out = torch.empty_like(query)
    if not is_copyable(out):
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((num_rows, query_heads, length), dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    groups, key_heads, prefix_length, _ = prefix_key.shape
    with torch.cuda.device(query.device):
        _native.kernels().cuda_sibling_attention_forward(
            [_headed(tensor) for tensor in (query, key, value, prefix_key, prefix_value, out)],
            lse.data_ptr(),
            _native.address(prefix_lengths),
            [num_rows, groups, query_heads, key_heads, length, prefix_length, head_size],
            query.dtype is torch.float16,
            scale,
            torch.cuda.current_stream().cuda_stream,
        )
    return out, lse
