# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance with two branches and a renormalisation, row by row.

Formulas as in BAGEL's public inference code: ``v_text = u + s (v - u)``, then ``v' = ui + si (v_text -
ui)``, and the factor ``clamp(|v| / (|v'| + 1e-8), renorm_min, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends
from unirl.ops._reduction import ordered_sum, rounded_sqrt

RENORMS = (None, "global", "channel", "text_channel")
NORM_EPSILON = 1e-8


def guided_velocity(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: float | Tensor,
    image_scale: float | Tensor,
    *,
    renorm: str | None = "global",
    renorm_min: float = 0.0,
    lengths: Sequence[int] | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Guided velocity ``[N, seq, C]``; every row is a function of its own branches and scales only.

    Differentiable in the three branches (through the norms too). A row whose scales are all exactly 1 comes
    back as ``cond`` bit for bit, as it does when its branch is ``None``.

    Args:
        cond: conditional velocity ``[N, seq, C]``; arithmetic is float32 (float64 for float64).
        text_uncond: velocity without the text, same shape, or ``None`` for no text guidance.
        image_uncond: velocity without the image, same shape, or ``None`` for no image guidance.
        text_scale: finite number, or ``[N]``; no gradient.
        image_scale: finite number, or ``[N]``; no gradient.
        renorm: ``"global"``: one factor a row, norms over its real tokens; ``"channel"``: one factor a token;
            ``"text_channel"``: one a token, after the text guidance and before the image guidance; ``None``:
            none.
        renorm_min: lower bound of the factor, 0 to 1.
        lengths: real tokens of each row ``[N]``; the rest is left out of the norms and zero in the result.
        backend: ``None`` (picked by device), ``"native"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: shapes, dtypes or devices that differ, an unknown ``renorm``, ``renorm_min`` out of range.
    """
    arguments.check_tensor("cond", cond)
    arguments.check_dtype("cond", cond, arguments.FLOAT_DTYPES)
    if cond.ndim != 3:
        raise ValueError(f"cond has {cond.ndim} axes; expected [N, seq, C]")
    for name, branch in (("text_uncond", text_uncond), ("image_uncond", image_uncond)):
        if branch is not None:
            arguments.check_tensor(name, branch)
            arguments.check_shape(name, branch, cond.shape, "the shape of cond")
            arguments.check_dtype(name, branch, (cond.dtype,))
            arguments.check_device(name, branch, cond.device, "cond")
    arguments.check_choice("renorm", renorm, RENORMS)
    if not isinstance(renorm_min, (int, float)) or not 0.0 <= renorm_min <= 1.0:
        raise ValueError(f"renorm_min is {renorm_min!r}; allowed: a number from 0 to 1")
    num_rows, seq, _ = cond.shape
    text = arguments.row_values("text_scale", text_scale, num_rows, cond.device)
    image = arguments.row_values("image_scale", image_scale, num_rows, cond.device)
    counts = arguments.token_counts(lengths, num_rows, seq, cond.device)
    inputs = (cond, text_uncond, image_uncond, text, image, counts, renorm, float(renorm_min))
    if _backends.pick("guided_velocity", cond.device, backend) == _backends.REFERENCE:
        return guided_velocity_reference(*inputs)
    return torch.ops.unirl.guided_velocity(*inputs)


def guided_velocity_reference(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> Tensor:
    """The plain PyTorch guidance; scales are float64 ``[N]``."""
    compute = torch.float64 if cond.dtype is torch.float64 else torch.float32
    mask = None if lengths is None else arguments.real_token_mask(lengths, cond)
    plain = _real(cond.to(compute), mask)
    guided = plain
    text_scale, image_scale = (scale.to(compute).reshape(-1, 1, 1) for scale in (text_scale, image_scale))
    guided_rows = torch.zeros_like(text_scale, dtype=torch.bool)
    if text_uncond is not None:
        guided = _extrapolate(_real(text_uncond.to(compute), mask), guided, text_scale)
        guided_rows = guided_rows | (text_scale != 1.0)
        if renorm == "text_channel":
            guided = _renormalised(plain, guided, guided_rows, "channel", renorm_min)
    if image_uncond is not None:
        guided = _extrapolate(_real(image_uncond.to(compute), mask), guided, image_scale)
        guided_rows = guided_rows | (image_scale != 1.0)
    if renorm in ("global", "channel"):
        guided = _renormalised(plain, guided, guided_rows, renorm, renorm_min)
    return guided.to(cond.dtype).contiguous()


def guided_velocity_backward_reference(
    grad_out: Tensor, cond: Tensor, text_uncond: Tensor | None, image_uncond: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the three branches in plain PyTorch, empty for ``None``; for devices without kernels."""
    with torch.enable_grad():
        leaves = [
            None if branch is None else branch.detach().requires_grad_()
            for branch in (cond, text_uncond, image_uncond)
        ]
        out = guided_velocity_reference(leaves[0], leaves[1], leaves[2], *others)  # type: ignore[arg-type]
        given = [leaf for leaf in leaves if leaf is not None]
        grads = iter(torch.autograd.grad(out, given, grad_out))
    first, second, third = (cond.new_empty(0) if leaf is None else next(grads) for leaf in leaves)
    return first, second, third


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Set padding to zero, whatever it holds."""
    return (
        values
        if mask is None
        else torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
    )


def _extrapolate(base: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """``base + scale (target - base)`` with scale ``[N, 1, 1]``; ``target`` itself where the scale is 1."""
    return torch.where(scale == 1.0, target, base + scale * (target - base))


def _renormalised(plain: Tensor, guided: Tensor, rows: Tensor, kind: str | None, renorm_min: float) -> Tensor:
    """Scale ``guided`` on the chosen ``rows`` by min(1, |plain| / |guided|), bounded below by
    ``renorm_min``.
    """
    plain_norm, guided_norm = _norm(plain, kind), _norm(guided, kind)
    factor = torch.clamp(plain_norm / (guided_norm + NORM_EPSILON), min=renorm_min, max=1.0)
    return torch.where(rows, guided * _Spread.apply(factor, guided.shape), guided)


class _Spread(torch.autograd.Function):
    """Repeats a factor over its row or token. Its gradient is summed in the fixed order: padding does not enter."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape = factor.shape
        return factor.expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = ordered_sum(grad.flatten(1) if ctx.shape[1] == 1 else grad)
        return total.reshape(ctx.shape).to(grad.dtype), None


def _norm(values: Tensor, kind: str | None) -> Tensor:
    """Euclidean norm of each row ``[N, 1, 1]`` or of each token ``[N, seq, 1]``; its gradient at 0 is 0."""
    squares = values * values
    total = (
        ordered_sum(squares.flatten(1)).reshape(-1, 1, 1)
        if kind == "global"
        else ordered_sum(squares).unsqueeze(-1)
    )
    total = total.to(values.dtype)
    return torch.where(
        total > 0,
        rounded_sqrt(torch.where(total > 0, total, torch.ones_like(total))),
        torch.zeros_like(total),
    )
