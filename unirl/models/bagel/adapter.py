# SPDX-License-Identifier: Apache-2.0
"""Linear layers that peft may have put an adapter around."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unirl.models.bagel.layers import Linear


def project(layer: nn.Module, input: Tensor) -> Tensor:
    """``[..., in]`` through a linear layer, with its adapter if it has one, to ``[..., out]``.

    An adapter's factors are float32, so peft widens the layer's input and result and multiplies in float32, which costs a GPU
    more than the layer itself. For 16-bit inputs on a GPU the factors are rounded for the products instead, as mixed precision
    does; what the optimizer moves stays float32.
    """
    is_narrow = input.is_cuda and input.dtype in (torch.bfloat16, torch.float16) and not _is_cast()
    if is_narrow and not isinstance(layer, Linear) and hasattr(layer, "lora_A"):
        base, name = layer.get_base_layer(), _active_adapter(layer)
        if isinstance(base, Linear) and name is not None and not base.weight.requires_grad:
            down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
            return adapted(input, base, down, up, layer.scaling[name])
    return layer(input)


def project_onto(residual: Tensor, layer: nn.Module, input: Tensor) -> Tensor:
    """``residual + project(layer, input)``; the residual's memory may be the result's where no graph is kept.

    On a GPU a plain layer's product adds to the residual itself, where a row need not keep its bits in every batch: the sum is
    rounded once and takes no pass of its own. So it does for trained weights: a rollout's copy of them is frozen, and has to
    give a replay's bits.
    """
    if not _adds_itself(layer, input):
        return residual + project(layer, input)
    weight = layer.weight.t()
    if not input.is_contiguous():
        weights = weight.expand(input.shape[0], -1, -1)
        if torch.is_grad_enabled():
            return torch.baddbmm(residual, input, weights)
        return residual.contiguous().baddbmm_(input, weights)
    rows, sums = input.flatten(0, -2), residual.reshape(-1, residual.shape[-1])
    if torch.is_grad_enabled():
        return torch.addmm(sums, rows, weight).view(residual.shape)
    return sums.addmm_(rows, weight).view(residual.shape)


def _adds_itself(layer: nn.Module, input: Tensor) -> bool:
    return (
        isinstance(layer, Linear)
        and layer.bias is None
        and not layer.batch_invariant
        and input.is_cuda
        and input.ndim == 3
        and not _is_cast()
        and not torch.compiler.is_compiling()
    )


def _is_cast() -> bool:
    """Whether autocast is on: it would leave a product in place alone, and round the residual of any other."""
    return torch.is_autocast_enabled("cuda")


def adapted(input: Tensor, base: Linear, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """``base(input) + scale * up(down(input))`` with the factors rounded to the input's dtype; ``base`` is frozen.

    Args:
        input: ``[N, ..., in]``. With ``base.batch_invariant`` each entry of the first axis has products of its own.
        down, up: ``[rank, in]`` and ``[out, rank]``.
    """
    down, up = down.to(input.dtype), (scale * up).to(input.dtype)

    def rows_through(rows: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            narrow = F.linear(rows, down)
        else:
            narrow, rows = _Down.apply(rows, down)
        # The wide product comes last: it adds to what the adapter wrote, and a layer that is recomputed for its backward pass
        # stops before it where nothing reads the result.
        return F.linear(narrow, up, base.bias).addmm_(rows, base.weight.t())

    if base.batch_invariant and input.numel():
        entries = input.reshape(input.shape[0], -1, input.shape[-1]).unbind()
        result = torch.stack([rows_through(entry) for entry in entries])
    else:
        result = rows_through(input.reshape(-1, input.shape[-1]))
    return result.reshape(*input.shape[:-1], base.out_features)


class _Down(torch.autograd.Function):
    """Rows ``[R, in]`` to ``[R, rank]``, and the rows again: backward, the narrow product adds to their gradient in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, down)
        ctx.set_materialize_grads(False)
        again = rows.view_as(rows)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(again)
        return F.linear(rows, down), again

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_narrow: Tensor, of_rows: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        rows, down = ctx.saved_tensors
        of_down = of_narrow.t() @ rows if ctx.needs_input_grad[1] else None
        # Nothing else reads this gradient: the rows that are given again have one reader.
        return None if of_rows is None else of_rows.addmm_(of_narrow, down), of_down


def _active_adapter(layer: nn.Module) -> str | None:
    """The name of a peft layer's only adapter, where it is in use and nothing but two factors."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged:
        return None
    name = names[0]
    plain = name not in layer.lora_variant and isinstance(layer.lora_dropout[name], nn.Identity)
    return name if plain and layer.lora_B[name].bias is None else None
