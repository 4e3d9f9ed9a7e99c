# SPDX-License-Identifier: Apache-2.0
"""Packing past the dispatcher: with a hundred rows in a list, its way in and out costs more than the copy itself.

Whatever could want to see the operator (a trace, a mode, a transform, a profile, a tensor that is not what it seems)
gets the operator; the kernels and the gradients are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from unirl.ops import _native_packing

_PLAIN_TYPES = {Tensor, nn.Parameter}
_requires_grad = attrgetter("requires_grad")


def pad(rows: list[Tensor], bound: int) -> Tensor:
    """As ``torch.ops.unirl.pad_latents``."""
    if not (_nobody_watches() and _are_plain(rows)):
        return torch.ops.unirl.pad_latents(rows, bound)
    if torch.is_grad_enabled() and any(map(_requires_grad, rows)):
        return _Pad.apply(bound, *rows)
    return _native_packing.pad(rows, bound)


def trim(latents: Tensor, lengths: list[int]) -> list[Tensor]:
    """As ``torch.ops.unirl.trim_latents``."""
    if not (_nobody_watches() and _are_plain([latents])):
        return torch.ops.unirl.trim_latents(latents, lengths)
    if torch.is_grad_enabled() and latents.requires_grad:
        return list(_Trim.apply(latents, lengths))
    return _native_packing.trim(latents, lengths)


def _nobody_watches() -> bool:
    try:
        return not (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._are_functorch_transforms_active()
            or torch.jit.is_tracing()
            or torch._C._autograd._profiler_enabled()
            or torch.autograd.forward_ad._current_level >= 0
        )
    except AttributeError:  # a torch that answers one of these elsewhere
        return False


def _are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether memory holds the values: no subclass, and no view that conjugates or negates on reading."""
    return (
        {*map(type, tensors)} <= _PLAIN_TYPES
        and not tensors[0].is_complex()
        and not any(map(Tensor.is_neg, tensors))
    )


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bound: int, *rows: Tensor) -> Tensor:
        ctx.lengths = [row.shape[1] for row in rows]
        return _native_packing.pad(list(rows), bound)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *trim(grads[0], ctx.lengths)


class _Trim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latents: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
        ctx.bound = latents.shape[2]
        return tuple(_native_packing.trim(latents, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return pad(list(grads), ctx.bound), None
