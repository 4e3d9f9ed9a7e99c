# SPDX-License-Identifier: Apache-2.0
"""Attention of sibling sequences that share a prefix: one copy of the prefix, no mask, exact softmax.

N = G n siblings; the n rows of a group are contiguous. Every query of a sibling attends to the prefix of its
group and to all keys of its own sequence. Query head ``h`` uses key head ``h // (Hq / Hk)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _attention_backends as backends


class AttentionArguments(NamedTuple):
    """Checked arguments of one call; ``prefix_lengths`` is int64 ``[G]`` or ``None``.

    Without ``need_lse`` a backend may return an empty tensor in the place of the log-sum-exp.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    prefix_key: Tensor
    prefix_value: Tensor
    prefix_lengths: Tensor | None
    scale: float
    need_lse: bool = True


def sibling_prefix_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    *,
    prefix_lengths: Sequence[int] | Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over a group's shared prefix and a sibling's own keys; differentiable in all five
    tensors.

    A row's bits do not depend on the number of siblings or groups in the call. Prefix gradients are summed
    over the siblings of a group.

    Args:
        query: ``[N, Hq, L, D]``, float32, bfloat16, float16 or float64; strides are free. On a GPU the kernels
            are made for D 64 and 128; smaller ones are padded with zeros, which copies.
        key, value: ``[N, Hk, L, D]``, ``Hq`` a multiple of ``Hk``.
        prefix_key, prefix_value: ``[G, Hk, P, D]``, ``N`` a multiple of ``G``; ``P`` may be 0.
        prefix_lengths: real prefix tokens of each group ``[G]``, 0 to P; by default P for all.
        scale: factor of the logits; by default ``D ** -0.5``.
        return_lse: also return the natural log-sum-exp of the scaled logits, float32 ``[N, Hq, L]`` (float64
            for float64 inputs), not differentiable.
        backend: ``None`` (picked by device) or one of :func:`available_attention_backends`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a backend that is not available and why.
    """
    checked = _check(query, key, value, prefix_key, prefix_value, prefix_lengths, scale)
    checked = checked._replace(need_lse=return_lse)
    inputs: backends.Inputs = checked[:5]
    options = (checked.prefix_lengths, checked.scale)
    head_size = query.shape[3]
    if torch.compiler.is_compiling() and backend is not None:
        name = backend
    elif backend is None:
        if (wider := backends.padded_head_size(query)) is not None:
            inputs = tuple(F.pad(tensor, (0, wider - head_size)) for tensor in inputs)
        name = backends.LATER if torch.compiler.is_compiling() else backends.route(inputs, *options)
    else:
        name = backends.check_requested(backend, inputs, *options)
    if name == backends.REFERENCE:
        out, lse = sibling_prefix_attention_reference(checked)
    else:
        out, lse = torch.ops.unirl.sibling_prefix_attention(*inputs, *options, name)
        out = out if out.shape[3] == head_size else out[..., :head_size]
    return (out, lse.detach()) if return_lse else out


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Sequence[int] | Tensor | None,
    scale: float | None,
) -> AttentionArguments:
    tensors = {
        "query": query,
        "key": key,
        "value": value,
        "prefix_key": prefix_key,
        "prefix_value": prefix_value,
    }
    for name, tensor in tensors.items():
        arguments.check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ValueError(f"{name} has {tensor.ndim} axes; expected 4: [rows, heads, tokens, head size]")
    arguments.check_dtype("query", query, arguments.FLOAT_DTYPES)
    for name, tensor in tensors.items():
        arguments.check_dtype(name, tensor, (query.dtype,))
        arguments.check_device(name, tensor, query.device, "query")
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    if head_size == 0:
        raise ValueError("query has head size 0; expected [N, Hq, L, D] with D at least 1")
    if key_heads == 0 or query_heads % key_heads:
        raise ValueError(
            f"query has {query_heads} heads, prefix_key {key_heads}; Hq must be a multiple of Hk"
        )
    arguments.check_shape("key", key, (num_rows, key_heads, length, head_size), "[N, Hk, L, D]")
    arguments.check_shape("value", value, (num_rows, key_heads, length, head_size), "[N, Hk, L, D]")
    arguments.check_shape(
        "prefix_key", prefix_key, (groups, key_heads, prefix_length, head_size), "[G, Hk, P, D]"
    )
    arguments.check_shape("prefix_value", prefix_value, prefix_key.shape, "[G, Hk, P, D]")
    if (groups == 0) != (num_rows == 0) or (groups and num_rows % groups):
        raise ValueError(f"query has {num_rows} rows, prefix_key {groups} groups; N must be a multiple of G")
    lengths = arguments.token_counts(
        prefix_lengths, groups, prefix_length, query.device, name="prefix_lengths", axis="[G]"
    )
    factor = head_size**-0.5 if scale is None else _checked_scale(scale)
    return AttentionArguments(query, key, value, prefix_key, prefix_value, lengths, factor)


def _checked_scale(scale: float | Tensor) -> float:
    number = isinstance(scale, (int, float)) or (isinstance(scale, Tensor) and scale.numel() == 1)
    if not number or not abs(factor := float(scale)) <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale is {scale!r}; allowed: a finite number in the range of float32, or None for D ** -0.5"
        )
    return factor


def available_attention_backends(device: torch.device | str) -> tuple[str, ...]:
    """Names that ``backend=`` may have on ``device``, the preferred one first.

    A kernel that is missing, or does not take a call's dtype, head size or lengths, says why when asked for.
    """
    return backends.names(torch.device(device).type)


def sibling_prefix_attention_reference(checked: AttentionArguments) -> tuple[Tensor, Tensor]:
    """The plain PyTorch attention: joint softmax over copied prefix and own keys, float32 (float64 for
    float64).
    """
    query, prefix_key, lengths = checked.query, checked.prefix_key, checked.prefix_lengths
    if lengths is None or prefix_key.shape[2] == 0 or query.shape[0] == 0:
        return _joint_softmax(checked, None)
    if query.device.type != "cpu":
        return _joint_softmax(checked, lengths)
    counts = lengths.tolist()
    if len(set(counts)) == 1:
        return _joint_softmax(_group_slice(checked, slice(None), slice(None), counts[0]), None)
    # One call a length: with a mask, a short prefix would see another summation order beside a long one.
    siblings = query.shape[0] // len(counts)
    outs, lses, order = [], [], []
    for count in sorted(set(counts)):
        groups = torch.tensor([group for group, other in enumerate(counts) if other == count])
        rows = (groups.unsqueeze(1) * siblings + torch.arange(siblings)).flatten()
        out, lse = _joint_softmax(_group_slice(checked, rows, groups, count), None)
        outs.append(out)
        lses.append(lse)
        order.append(rows)
    inverse = torch.argsort(torch.cat(order))
    lse = torch.cat(lses)
    return torch.cat(outs)[inverse], lse[inverse] if checked.need_lse else lse


def _group_slice(
    checked: AttentionArguments, rows: slice | Tensor, groups: slice | Tensor, count: int
) -> AttentionArguments:
    return checked._replace(
        query=checked.query[rows],
        key=checked.key[rows],
        value=checked.value[rows],
        prefix_key=checked.prefix_key[groups][:, :, :count],
        prefix_value=checked.prefix_value[groups][:, :, :count],
        prefix_lengths=None,
    )


def _joint_softmax(checked: AttentionArguments, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    query, key, value, prefix_key, prefix_value, _, scale, need_lse = checked
    num_rows, query_heads, length, head_size = query.shape
    groups, key_heads, prefix_length, _ = prefix_key.shape
    compute = torch.float64 if query.dtype is torch.float64 else torch.float32
    # Query heads of one key head are folded into the rows of one matrix product.
    folded = (query.to(compute) * scale).reshape(
        num_rows * key_heads, (query_heads // key_heads) * length, head_size
    )
    keys = _with_prefix(prefix_key.to(compute), key.to(compute))
    values = _with_prefix(prefix_value.to(compute), value.to(compute))
    logits = torch.bmm(folded, keys.transpose(1, 2))
    if lengths is not None:
        positions = torch.arange(prefix_length + length, device=query.device)
        hidden = (positions >= lengths.unsqueeze(1)) & (positions < prefix_length)
        rows_a_group = logits.shape[0] // groups
        logits = logits.masked_fill(hidden.repeat_interleave(rows_a_group, 0).unsqueeze(1), -torch.inf)
    out = torch.bmm(torch.softmax(logits, dim=-1), values)
    shape = (num_rows, query_heads, length)
    lse = torch.logsumexp(logits.detach(), dim=-1).reshape(shape) if need_lse else out.new_empty(0)
    return out.reshape(*shape, head_size).to(query.dtype), lse


def _with_prefix(prefix: Tensor, own: Tensor) -> Tensor:
    """Join ``[G, Hk, P, D]`` and ``[N, Hk, L, D]`` into ``[N Hk, P + L, D]``."""
    num_rows, heads, length, head_size = own.shape
    if prefix.shape[2]:
        siblings = num_rows // max(prefix.shape[0], 1)
        shared = prefix.unsqueeze(1).expand(-1, siblings, -1, -1, -1).reshape(num_rows, *prefix.shape[1:])
        own = torch.cat([shared, own], dim=2)
    return own.reshape(num_rows * heads, prefix.shape[2] + length, head_size)
