# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.guided_velocity`` and its backward. Scales are float64 ``[N]``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.guidance import RENORMS, guided_velocity_backward_reference, guided_velocity_reference

_INPUTS = (
    "Tensor cond, Tensor? text_uncond, Tensor? image_uncond, Tensor text_scale, Tensor image_scale, "
    "Tensor? lengths, str? renorm, float renorm_min"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define("unirl::guided_velocity", f"({_INPUTS}) -> Tensor", tags=_TAGS)
torch.library.define(
    "unirl::guided_velocity_backward", f"(Tensor grad_out, {_INPUTS}) -> (Tensor, Tensor, Tensor)", tags=_TAGS
)


class _NativeInputs:
    """The input arguments of a native call; it keeps the tensors alive whose addresses it holds."""

    def __init__(
        self,
        cond: Tensor,
        text_uncond: Tensor | None,
        image_uncond: Tensor | None,
        text_scale: Tensor,
        image_scale: Tensor,
        lengths: Tensor | None,
        renorm: str | None,
        renorm_min: float,
    ) -> None:
        self.branches = [
            branch if branch is None else _native.contiguous_rows(branch)
            for branch in (cond, text_uncond, image_uncond)
        ]
        self.per_row = [
            value if value is None else value.contiguous() for value in (text_scale, image_scale, lengths)
        ]
        self.call = (
            *(_native.rows(branch) for branch in self.branches),
            *(_native.address(value) for value in self.per_row),
            RENORMS.index(renorm),
            renorm_min,
            tuple(cond.shape),
        )
        self.wide = cond.dtype is torch.float64


@torch.library.impl("unirl::guided_velocity", "cpu")
def _guided_velocity_cpu(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> Tensor:
    inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
    if default_backend("guided_velocity", "cpu") == REFERENCE:
        return guided_velocity_reference(*inputs)
    prepared = _NativeInputs(*inputs)
    out = torch.empty(cond.shape, dtype=cond.dtype)
    _native.kernels().guided_velocity(prepared.wide, *prepared.call, _native.rows(out), _native.num_threads())
    return out


@torch.library.impl("unirl::guided_velocity", "cuda")
def _guided_velocity_cuda(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> Tensor:
    inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
    if default_backend("guided_velocity", "cuda") == REFERENCE:
        return guided_velocity_reference(*inputs)
    from unirl.ops.triton.guidance import guided_velocity

    return guided_velocity(*inputs)


@torch.library.register_fake("unirl::guided_velocity")
def _guided_velocity_fake(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> Tensor:
    return cond.new_empty(cond.shape)


@torch.library.impl("unirl::guided_velocity_backward", "cpu")
def _guided_velocity_backward_cpu(
    grad_out: Tensor,
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
    if default_backend("guided_velocity", "cpu") == REFERENCE:
        return guided_velocity_backward_reference(grad_out, *inputs)
    prepared = _NativeInputs(*inputs)
    upstream = _native.contiguous_rows(grad_out)
    grads = [
        torch.empty(cond.shape if branch is not None else (0,), dtype=cond.dtype) for branch in inputs[:3]
    ]
    targets = [_native.rows(grad) if grad.ndim == 3 else _native.NO_ROWS for grad in grads]
    _native.kernels().guided_velocity_backward(
        prepared.wide, _native.rows(upstream), *prepared.call, *targets, _native.num_threads()
    )
    return grads[0], grads[1], grads[2]


@torch.library.impl("unirl::guided_velocity_backward", "cuda")
def _guided_velocity_backward_cuda(
    grad_out: Tensor,
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
    if default_backend("guided_velocity", "cuda") == REFERENCE:
        return guided_velocity_backward_reference(grad_out, *inputs)
    from unirl.ops.triton.guidance import guided_velocity_backward

    return guided_velocity_backward(grad_out, *inputs)


@torch.library.register_fake("unirl::guided_velocity_backward")
def _guided_velocity_backward_fake(
    grad_out: Tensor,
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> tuple[Tensor, Tensor, Tensor]:
    def like(branch: Tensor | None) -> Tensor:
        return cond.new_empty(cond.shape if branch is not None else (0,))

    return like(cond), like(text_uncond), like(image_uncond)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, renorm, renorm_min = inputs
    ctx.save_for_backward(*tensors)
    ctx.renorm, ctx.renorm_min = renorm, renorm_min


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.unirl.guided_velocity_backward(grad_out, *ctx.saved_tensors, ctx.renorm, ctx.renorm_min)
    wanted = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:3], strict=True)]
    return (*wanted, *(None for _ in range(5)))


torch.library.register_autograd("unirl::guided_velocity", _backward, setup_context=_setup_context)
