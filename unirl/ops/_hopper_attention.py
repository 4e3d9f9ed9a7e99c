# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of the attention over a shared prefix and own keys (Hopper, compute capability 9.0)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._attention_layout import empty_like, headed, laid_out_like

CAPABILITY = (9, 0)
HEAD_SIZES = (64, 128)
BACKWARD_HEAD_SIZES = (128,)
DTYPES = (torch.bfloat16, torch.float16)
MAX_RATIO = 64
_ALIGNMENT_BYTES = 16
_TILE_ROWS = 64  # of a query tile in the backward kernel
_TILE_KEYS = 128  # of a key tile there


def why_missing(device_index: int) -> str | None:
    """Return what the kernel lacks on a CUDA device, or ``None``."""
    if reason := _native.why_missing("cuda"):
        return reason
    if not fits_device(device_index):
        return f"it needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200, H20); cuda:{device_index} has another"
    return None


@cache
def fits_device(device_index: int) -> bool:
    """Whether a CUDA device has the instructions of the kernel."""
    return torch.cuda.get_device_capability(device_index) == CAPABILITY


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
            return (
                f"the memory layout of {name}, strides {tuple(tensor.stride())}; allowed: values of a head adjacent, "
                "address and other strides multiples of 16 bytes"
            )
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
    out = empty_like(query)
    query = _readable(query)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if out.numel() == 0:
        return out, lse
    with torch.cuda.device(query.device):
        _native.kernels().cuda_sibling_attention_forward(
            *_call(query, key, value, prefix_key, prefix_value, out, lse, prefix_lengths, scale),
            torch.cuda.current_stream().cuda_stream,
        )
    return out, lse


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    out: Tensor,
    lse: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
) -> tuple[object, ...]:
    """The arguments that forward and backward share, as the extension takes them."""
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    return (
        [headed(tensor) for tensor in (query, key, value, prefix_key, prefix_value, out)],
        lse.data_ptr(),
        _native.address(prefix_lengths),
        [num_rows, groups, query_heads, key_heads, length, prefix_length, head_size],
        query.dtype is torch.float16,
        scale,
    )


def _readable(tensor: Tensor) -> Tensor:
    return tensor if is_copyable(tensor) else tensor.contiguous()


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
    """Gradients of query, key, value, prefix_key and prefix_value, in one pass and the same bits in every run.

    Head size 128. Takes what :func:`forward` took and returned. Beside the results it allocates float32 for
    one query gradient, and for one prefix gradient of each sibling.
    """
    assert query.shape[3] in BACKWARD_HEAD_SIZES, query.shape
    query, grad_out, out = map(_readable, (query, grad_out, out))
    grads = tuple(empty_like(tensor) for tensor in (query, key, value))
    if query.numel() == 0:
        prefix_grads = [empty_like(tensor) for tensor in (prefix_key, prefix_value)]
        return *(grad.zero_() for grad in grads), *(grad.zero_() for grad in prefix_grads)
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    tiles = _native.kernels().cuda_sibling_attention_query_tiles(length, query_heads, key_heads)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    prefix_shape = (groups, num_rows // groups, key_heads, prefix_length, head_size)
    # Behind a shorter group's prefix nothing is written.
    prefix_grads = [scratch(*prefix_shape) for _ in range(2)]
    if prefix_lengths is not None:
        for grad in prefix_grads:
            grad.zero_()
    row_stats = scratch(num_rows, key_heads, tiles, 2, _TILE_ROWS)
    partial_query = scratch(num_rows, key_heads, tiles, _TILE_ROWS, head_size)
    key_tiles = _native.kernels().cuda_sibling_attention_key_tiles(length, prefix_length)
    with torch.cuda.device(query.device):
        split = _native.kernels().cuda_sibling_attention_split_units(
            num_rows, query_heads, key_heads, length, prefix_length
        )
        split_sums = scratch(split, 2, _TILE_KEYS, head_size)
        num_flags = 2 * num_rows * key_heads * key_tiles + split
        progress = torch.zeros(num_flags, dtype=torch.int32, device=query.device)
        _native.kernels().cuda_sibling_attention_backward(
            *_call(query, key, value, prefix_key, prefix_value, out, lse, prefix_lengths, scale),
            [headed(tensor) for tensor in (grad_out, *grads)],
            [tensor.data_ptr() for tensor in (*prefix_grads, row_stats, partial_query, progress, split_sums)],
            torch.cuda.current_stream().cuda_stream,
        )
    summed = [grad.sum(1) if num_rows > groups else grad[:, 0] for grad in prefix_grads]
    return *grads, laid_out_like(summed[0], prefix_key), laid_out_like(summed[1], prefix_value)
