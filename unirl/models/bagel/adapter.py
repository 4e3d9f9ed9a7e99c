# SPDX-License-Identifier: Apache-2.0
"""Linear layers that peft may have put an adapter around."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.models.bagel.layers import Linear


def project(layer: nn.Module, input: Tensor) -> Tensor:
    """``[..., in]`` through a linear layer, with its adapter if it has one, to ``[..., out]``.

    An adapter's factors are float32, so peft widens the layer's input and result and multiplies in float32, which costs a GPU
    more than the layer itself. For 16-bit inputs on a GPU the factors are rounded for the products instead, as mixed precision
    does; what the optimizer moves stays float32.
    """
    if not isinstance(layer, Linear) and input.is_cuda and input.dtype in (torch.bfloat16, torch.float16):
        base, name = layer.get_base_layer(), _active_adapter(layer)
        if isinstance(base, Linear) and name is not None:
            down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
            return adapted(input, base, down, up, layer.scaling[name])
    return layer(input)


def adapted(input: Tensor, base: Linear, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """``base(input) + scale * up(down(input))`` with the factors rounded to the input's dtype, added where the first term lies.

    Args:
        input: ``[N, ..., in]``. With ``base.batch_invariant`` each entry of the first axis has products of its own.
        down, up: ``[rank, in]`` and ``[out, rank]``.
    """
    down, up = down.to(input.dtype), (scale * up).to(input.dtype)

    def rows_through(rows: Tensor) -> Tensor:
        return F.linear(rows, base.weight, base.bias).addmm_(F.linear(rows, down), up.t())

    if base.batch_invariant and input.numel():
        entries = input.reshape(input.shape[0], -1, input.shape[-1]).unbind()
        result = torch.stack([rows_through(entry) for entry in entries])
    else:
        result = rows_through(input.reshape(-1, input.shape[-1]))
    return result.reshape(*input.shape[:-1], base.out_features)


def _active_adapter(layer: nn.Module) -> str | None:
    """The name of a peft layer's only adapter, where it is in use and nothing but two factors."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or layer.disable_adapters or layer.merged:
        return None
    name = names[0]
    plain = name not in layer.lora_variant and isinstance(layer.lora_dropout[name], nn.Identity)
    return name if plain and layer.lora_B[name].bias is None else None
