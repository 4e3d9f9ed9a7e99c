# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.sibling_prefix_attention`` and its backward; ``backend`` "" takes the routing table's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.ops import _attention_backends as backends
from unirl.ops._attention_layout import empty_like, laid_out_like
from unirl.ops.attention import AttentionArguments, sibling_prefix_attention_reference

_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor prefix_key, Tensor prefix_value"
_TAGS = (torch.Tag.pt2_compliant_tag,)
# Made of torch's own operators, whose results lie as these please.
_OWN_LAYOUT = (backends.REFERENCE, "composite")

torch.library.define(
    "unirl::sibling_prefix_attention",
    f"({_INPUTS}, Tensor? prefix_lengths, float scale, str backend) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "unirl::sibling_prefix_attention_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, Tensor? prefix_lengths, float scale, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


@torch.library.impl("unirl::sibling_prefix_attention", ("cpu", "cuda"))
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    inputs = (query, key, value, prefix_key, prefix_value)
    name = backends.resolve(backend, inputs, prefix_lengths, scale)
    if name == backends.REFERENCE:
        out, lse = sibling_prefix_attention_reference(AttentionArguments(*inputs, prefix_lengths, scale))
    else:
        out, lse = backends.module(name).forward(*inputs, prefix_lengths, scale)
    return (laid_out_like(out, query) if name in _OWN_LAYOUT else out), lse


@torch.library.register_fake("unirl::sibling_prefix_attention")
def _forward_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    prefix_lengths: Tensor | None,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return empty_like(query), query.new_empty(query.shape[:3], dtype=lse_dtype)


@torch.library.impl("unirl::sibling_prefix_attention_backward", ("cpu", "cuda"))
def _backward_kernel(
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (query, key, value, prefix_key, prefix_value)
    name = backends.backward_of(backend or backends.route(inputs, prefix_lengths, scale), query)
    if name != backends.REFERENCE:
        grads = backends.module(name).backward(grad_out, *inputs, out, lse, prefix_lengths, scale)
    else:
        grads = _reference_backward(grad_out, inputs, prefix_lengths, scale)
    if name in _OWN_LAYOUT:
        grads = tuple(laid_out_like(grad, tensor) for grad, tensor in zip(grads, inputs, strict=True))
    return grads[0], grads[1], grads[2], grads[3], grads[4]


def _reference_backward(
    grad_out: Tensor, inputs: backends.Inputs, prefix_lengths: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        q, k, v, prefix_k, prefix_v = leaves
        arguments = AttentionArguments(q, k, v, prefix_k, prefix_v, prefix_lengths, scale, need_lse=False)
        result, _ = sibling_prefix_attention_reference(arguments)
        return torch.autograd.grad(result, leaves, grad_out, allow_unused=True, materialize_grads=True)


@torch.library.register_fake("unirl::sibling_prefix_attention_backward")
def _backward_fake(
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
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = [empty_like(tensor) for tensor in (query, key, value, prefix_key, prefix_value)]
    return grads[0], grads[1], grads[2], grads[3], grads[4]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 8
    *inputs, prefix_lengths, out, lse = ctx.saved_tensors
    grads = torch.ops.unirl.sibling_prefix_attention_backward(
        grad_out, *inputs, out, lse, prefix_lengths, ctx.scale, ctx.backend
    )
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:5], strict=True)]
    return (*wanted, None, None, None)


torch.library.register_autograd("unirl::sibling_prefix_attention", _backward, setup_context=_setup_context)
