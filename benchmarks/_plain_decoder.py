# SPDX-License-Identifier: Apache-2.0
"""The peer of BAGEL's decoder: stock PyTorch, every sibling's keys and values behind a copy of the prefix.

It runs on the weights of the model that it is compared with, adapters included, and takes the place of
:meth:`unirl.models.bagel.transformer.Decoder.denoise`. Norms are torch's fused ones, rotation and adapters are in the dtype of the
activations, attention is SDPA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.models.bagel import Bagel
from unirl.models.bagel.transformer import Decoder, LayerCache, Tokens

LATENTS = "_moe_gen"
"""Suffix of the expert that latents go through; the markers' has none."""


class Adapter(NamedTuple):
    """``scale * down @ up`` beside a linear layer: ``[rank, in]`` and ``[out, rank]``."""

    down: Tensor
    up: Tensor
    scale: float


class Projection(NamedTuple):
    """A linear layer."""

    weight: Tensor
    bias: Tensor | None
    adapter: Adapter | None


class Weights(NamedTuple):
    """One layer's, by the names of its modules."""

    linear: dict[str, Projection]
    norm: dict[str, Tensor]
    eps: float


class Tables(NamedTuple):
    """Cosines and sines ``[N, 1, 1, D]`` of the rows' rotary positions."""

    cos: Tensor
    sin: Tensor


RunLayer = Callable[[Tensor, Tensor, Tables, LayerCache, Weights], tuple[Tensor, Tensor]]


def weights_of(layer: nn.Module, eps: float, dtype: torch.dtype) -> Weights:
    """The tensors of a :class:`DecoderLayer`, those of another dtype cast."""
    linear: dict[str, Projection] = {}
    norm: dict[str, Tensor] = {}
    for name, module in layer.named_modules():
        if hasattr(module, "lora_A"):
            down, up = (factor["default"].weight for factor in (module.lora_A, module.lora_B))
            base = module.get_base_layer()
            adapter = Adapter(down, up, module.scaling["default"])
        elif isinstance(module, nn.Linear) and "lora_" not in name and not name.endswith("base_layer"):
            base, adapter = module, None
        else:
            if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 1:
                norm[name.removeprefix("self_attn.")] = weight.to(dtype)
            continue
        bias = None if base.bias is None else base.bias.to(dtype)
        linear[name.removeprefix("self_attn.")] = Projection(base.weight.to(dtype), bias, adapter)
    return Weights(linear, norm, eps)


def project(input: Tensor, projection: Projection) -> Tensor:
    weight, bias, adapter = projection
    result = F.linear(input, weight, bias)
    if adapter is None:
        return result
    down, up = adapter.down.to(input.dtype), adapter.up.to(input.dtype)
    return result + F.linear(F.linear(input, down), up) * adapter.scale


def rotated(heads: Tensor, tables: Tables) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * tables.cos + torch.cat((-second, first), dim=-1) * tables.sin


def plain_layer(
    markers: Tensor, latents: Tensor, tables: Tables, prefix: LayerCache, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Markers ``[N, 2, hidden]`` and latents ``[N, L, hidden]`` through one layer."""
    head_dim = prefix.key.shape[3]

    def normed(hidden: Tensor, name: str) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], weights.norm[name], weights.eps)

    def heads(suffix: str, hidden: Tensor) -> list[Tensor]:
        query, key, value = (
            project(hidden, weights.linear[f"{part}_proj{suffix}"]).unflatten(-1, (-1, head_dim))
            for part in "qkv"
        )
        return [
            rotated(normed(query, f"q_norm{suffix}"), tables),
            rotated(normed(key, f"k_norm{suffix}"), tables),
            value,
        ]

    def mlp(hidden: Tensor, suffix: str) -> Tensor:
        gate, up, down = (weights.linear[f"mlp{suffix}.{part}_proj"] for part in ("gate", "up", "down"))
        hidden = normed(hidden, f"post_attention_layernorm{suffix}")
        return project(F.silu(project(hidden, gate)) * project(hidden, up), down)

    ends = heads("", normed(markers, "input_layernorm"))
    middles = heads(LATENTS, normed(latents, f"input_layernorm{LATENTS}"))
    query, key, value = (
        torch.cat((end[:, :1], middle, end[:, 1:]), dim=1).transpose(1, 2)
        for end, middle in zip(ends, middles, strict=True)
    )
    siblings = query.shape[0] // prefix.key.shape[0]
    key, value = (
        torch.cat((shared.repeat_interleave(siblings, 0), own), dim=2)
        for shared, own in ((prefix.key, key), (prefix.value, value))
    )
    mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2).flatten(2)
    ends = torch.cat((mixed[:, :1], mixed[:, -1:]), dim=1)
    markers = markers + project(ends, weights.linear["o_proj"])
    latents = latents + project(mixed[:, 1:-1], weights.linear[f"o_proj{LATENTS}"])
    return markers + mlp(markers, ""), latents + mlp(latents, LATENTS)


def plain_denoise(
    decoder: Decoder,
    layers: Iterable[Weights],
    run_layer: RunLayer,
    dtype: torch.dtype,
    tokens: Tokens,
    positions: Tensor,
    prefix: list[LayerCache],
    prefix_lengths: Tensor | None,
) -> Tensor:
    """What :meth:`Decoder.denoise` computes, in ``dtype``, for groups whose prefixes are equally long."""
    assert prefix_lengths is None and tokens.gen is not None, "one length of prefix, and latents"
    config = decoder.config
    exponent = torch.arange(0, config.head_dim, 2, device=positions.device) / config.head_dim
    angles = positions[:, None, None, None] * config.rope_theta**-exponent
    tables = Tables(*(torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin())))
    markers, latents = tokens.und.to(dtype), tokens.gen.to(dtype)
    for weights, (key, value) in zip(layers, prefix, strict=True):
        arguments = (markers, latents, tables, LayerCache(key.to(dtype), value.to(dtype)), weights)
        if decoder.gradient_checkpointing and torch.is_grad_enabled():
            markers, latents = checkpoint(run_layer, *arguments, use_reentrant=False)
        else:
            markers, latents = run_layer(*arguments)
    final = decoder.norm_moe_gen.weight
    hidden = F.rms_norm(latents, latents.shape[-1:], final.to(dtype), config.rms_norm_eps)
    return hidden.to(final.dtype)


@contextmanager
def replaced(owner: Any, **methods: Any) -> Iterator[None]:
    """An object's methods are others for a while."""
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]


def plain_decoder(model: Bagel, run_layer: RunLayer = plain_layer, dtype: torch.dtype | None = None) -> Any:
    """What makes a context in which ``model`` denoises through the peer, in ``dtype`` (its own by default)."""
    decoder = model.language_model.model
    eps, own = decoder.config.rms_norm_eps, dtype in (None, model.dtype)
    dtype = model.dtype if dtype is None else dtype
    taken = [weights_of(layer, eps, dtype) for layer in decoder.layers] if own else None

    def denoise(*arguments: Any) -> Tensor:
        layers = taken or (weights_of(layer, eps, dtype) for layer in decoder.layers)
        return plain_denoise(decoder, layers, run_layer, dtype, *arguments)

    return lambda: replaced(decoder, denoise=denoise)
