# SPDX-License-Identifier: Apache-2.0
"""What stands between a decoder layer's matrix products, on a GPU each in one pass over memory.

The kernels compute the formulas of the modules that call them, with the same roundings; only sums may go in another order,
and a row's bits depend on the row alone. Where :func:`fusable` says no, the modules use the formulas.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fusable(tensor: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take tensors like these. A compiler that traces the formulas fuses them itself."""
    return (
        tensor.is_cuda
        and _HAS_TRITON
        and tensor.dtype in _DTYPES
        and weight.dtype is tensor.dtype
        and not torch.compiler.is_compiling()
    )


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``hidden / sqrt(mean(hidden^2) + eps) * weight`` over the last axis of ``[..., width]``."""
    return _run(_NORM, (hidden.contiguous(), weight), (eps,))


def rotated_heads(
    und: Tensor, gen: Tensor | None, weights: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Heads of a block, normed and rotated, in token order ``[B, T, H, D]``: latents stand between two markers.

    Args:
        und: ``[B, U, H D]``; beside latents, the two markers. D is a power of two.
        gen: latents ``[B, V, H D]``, or ``None``.
        weights: of the two experts' norms, ``[D]``; without latents the second is not read.
        cos, sin: float32 ``[B or 1, T or 1, 1, D]``, of :class:`unirl.models.bagel.layers.Rotary`.
    """
    latents = None if gen is None else gen.contiguous()
    return _run(_HEADS, (und.contiguous(), latents, *weights, cos.contiguous(), sin.contiguous()), (eps,))


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return _run(_SILU, (gate.contiguous(), up.contiguous()), ())


class _Kernel(NamedTuple):
    """A function of tensors and numbers.

    Attributes:
        name: in the module of kernels; with a ``grad_out`` it gives the gradients of the first ``num_moving`` tensors.
        formula: the same function, which differentiates the others when they are trained.
    """

    name: str
    num_moving: int
    formula: Callable[..., Tensor]

    def __call__(self, *arguments: Any) -> Any:
        return getattr(_kernels(), self.name)(*arguments)


def _kernels() -> ModuleType:
    from unirl.models.bagel import fused_triton  # only where Triton is there

    return fused_triton


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, numbers: tuple[float, ...], *tensors: Tensor | None) -> Tensor:
        ctx.kernel, ctx.numbers = kernel, numbers
        ctx.save_for_backward(*tensors)
        return kernel(*tensors, *numbers)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        kernel, tensors, wanted = ctx.kernel, ctx.saved_tensors, ctx.needs_input_grad[2:]
        if any(wanted[kernel.num_moving :]):
            grads = _formula_gradients(kernel, tensors, ctx.numbers, grad_out, wanted)
        else:
            found = iter(kernel(*tensors, *ctx.numbers, grad_out.contiguous()))
            grads = [None if tensor is None else next(found, None) for tensor in tensors]
        return None, None, *(grad if want else None for grad, want in zip(grads, wanted, strict=True))


def _formula_gradients(
    kernel: _Kernel,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[float, ...],
    grad_out: Tensor,
    wanted: tuple[bool, ...],
) -> list[Tensor | None]:
    with torch.enable_grad():
        leaves = [
            tensor.detach().requires_grad_() if want and tensor is not None else tensor
            for tensor, want in zip(tensors, wanted, strict=True)
        ]
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        result = kernel.formula(*leaves, *numbers)
        found = iter(torch.autograd.grad(result, asked, grad_out, allow_unused=True))
    return [next(found) if want else None for want in wanted]


def _run(kernel: _Kernel, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]) -> Tensor:
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _Function.apply(kernel, numbers, *tensors)
    return kernel(*tensors, *numbers)[0]


def _norm_formula(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(hidden.dtype)


def _heads_formula(
    und: Tensor,
    gen: Tensor | None,
    und_weight: Tensor,
    gen_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> Tensor:
    half = cos.shape[-1] // 2

    def normed(projected: Tensor, weight: Tensor) -> Tensor:
        return _norm_formula(projected.unflatten(-1, (-1, 2 * half)).float(), weight, eps)

    heads = normed(und, und_weight)
    if gen is not None:
        heads = torch.cat((heads[:, :1], normed(gen, gen_weight), heads[:, 1:]), dim=1)
    return (heads * cos + heads.roll(half, dims=-1) * sin).to(und.dtype)


def _silu_formula(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


_NORM = _Kernel("rms_norm", 1, _norm_formula)
_HEADS = _Kernel("rotated_heads", 2, _heads_formula)
_SILU = _Kernel("silu_product", 2, _silu_formula)
