# SPDX-License-Identifier: Apache-2.0
"""The language model: a Qwen2-shaped decoder with two complete experts in every layer.

Text, vision features and image markers go through the understanding expert, VAE latents through the
generation expert (``*_moe_gen``); both meet in one attention. Which tokens are which never has to be looked
up: an image block is one marker, its tokens, one marker, so the two experts work on two separate tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unirl.models.bagel import fused
from unirl.models.bagel.adapter import project, project_onto
from unirl.models.bagel.config import LanguageConfig
from unirl.models.bagel.layers import Linear, RMSNorm, Rotary
from unirl.ops import sibling_prefix_attention


class Tokens(NamedTuple):
    """Hidden states of one block, by expert.

    Attributes:
        und: ``[B, U, hidden]``: a whole text or vision block, or the two markers around latents.
        gen: ``[B, V, hidden]`` latents, or ``None``.
    """

    und: Tensor
    gen: Tensor | None = None


class LayerCache(NamedTuple):
    """Rotated keys and values of one layer's prefix, ``[G, Hk, P, D]`` each."""

    key: Tensor
    value: Tensor


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query ``[B, Hq, T, D]``, key and value ``[B, Hk, T, D]`` of the block to the mixed ``[B, Hq, T, D]``."""


class Attention(nn.Module):
    """Projections, head norms and rotation of both experts; the mixing itself is passed in."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self._fuses = config.head_dim & (config.head_dim - 1) == 0
        hidden, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        for suffix in ("", "_moe_gen"):
            setattr(self, f"q_proj{suffix}", Linear(hidden, hidden))
            setattr(self, f"k_proj{suffix}", Linear(hidden, kv_width))
            setattr(self, f"v_proj{suffix}", Linear(hidden, kv_width))
            setattr(self, f"o_proj{suffix}", Linear(hidden, hidden, bias=False))
            setattr(self, f"q_norm{suffix}", RMSNorm(config.head_dim, config.rms_norm_eps))
            setattr(self, f"k_norm{suffix}", RMSNorm(config.head_dim, config.rms_norm_eps))

    def queries(self, tokens: Tokens, rotary: Rotary) -> Tensor:
        """``[B, Hq, T, D]`` in token order."""
        return self._rotated("q", tokens, rotary).transpose(1, 2)

    def keys_values(self, tokens: Tokens, rotary: Rotary) -> LayerCache:
        """``[B, Hk, T, D]`` each, in token order."""
        key = self._rotated("k", tokens, rotary)
        values = [self._heads(project(self.v_proj, tokens.und))]
        if tokens.gen is not None:
            values.append(self._heads(project(self.v_proj_moe_gen, tokens.gen)))
        return LayerCache(key.transpose(1, 2), in_token_order(*values).transpose(1, 2))

    def _rotated(self, which: str, tokens: Tokens, rotary: Rotary) -> Tensor:
        """Queries (``q``) or keys (``k``) ``[B, T, H, D]`` in token order, normed and rotated."""
        suffixes = ("", "_moe_gen") if tokens.gen is not None else ("",)
        projected = [
            project(getattr(self, f"{which}_proj{suffix}"), hidden)
            for suffix, hidden in zip(suffixes, tokens, strict=False)
        ]
        norms = [getattr(self, f"{which}_norm{suffix}") for suffix in ("", "_moe_gen")]
        if self._fuses and fused.fusable(projected[0], norms[0].weight):
            und, gen = projected if len(projected) == 2 else (projected[0], None)
            weights = norms[0].weight, norms[len(projected) - 1].weight
            return fused.rotated_heads(und, gen, weights, rotary.cos, rotary.sin, norms[0].eps)
        # Norm and rotation are float32 and rounded once, as in the public implementation.
        heads = [norm(self._heads(part).float()) for norm, part in zip(norms, projected, strict=False)]
        return rotary.apply(in_token_order(*heads)).to(tokens.und.dtype)

    def output(self, mixed: Tensor, residual: Tokens, skip_und: bool) -> Tokens:
        """The residual plus ``[B, Hq, T, D]`` back at hidden width, each token by its expert."""
        flat = mixed.transpose(1, 2).flatten(2)
        if residual.gen is None:
            return Tokens(project_onto(residual.und, self.o_proj, flat))
        ends, between = by_expert(flat)
        und = None if skip_und else project_onto(residual.und, self.o_proj, ends)
        return Tokens(und, project_onto(residual.gen, self.o_proj_moe_gen, between))

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


def in_token_order(und: Tensor, gen: Tensor | None = None) -> Tensor:
    """Put latents between their two markers along axis 1; without latents the block is already in order."""
    if gen is None:
        return und
    return torch.cat((und[:, :1], gen, und[:, 1:]), dim=1)


def by_expert(block: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`in_token_order` with latents: markers ``[B, 2, ...]``, and latents as a view."""
    return _ByExpert.apply(block)


class _ByExpert(torch.autograd.Function):
    """Its backward joins the two gradients; slices would pad three with zeros and add them."""

    @staticmethod
    def forward(ctx: Any, block: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((block[:, :1], block[:, -1:]), dim=1), block[:, 1:-1]

    @staticmethod
    def backward(ctx: Any, of_ends: Tensor, of_between: Tensor) -> Tensor:
        return in_token_order(of_ends, of_between)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """What ``[..., hidden]`` becomes, added to a residual of the same shape."""
        gate, up = project(self.gate_proj, hidden), project(self.up_proj, hidden)
        product = fused.silu_product(gate, up) if fused.fusable(gate, up) else F.silu(gate) * up
        return project_onto(residual, self.down_proj, product)


class DecoderLayer(nn.Module):
    """One layer of both experts."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.mlp_moe_gen = Mlp(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, RMSNorm(config.hidden_size, config.rms_norm_eps))
            setattr(self, f"{name}_moe_gen", RMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(
        self, tokens: Tokens, rotary: Rotary, attend: Attend | None, skip_und: bool = False
    ) -> tuple[Tokens | None, LayerCache]:
        """One block through the layer.

        Args:
            tokens: the block; without gradients its memory may be the result's.
            rotary: its rotation.
            attend: mixes it with its prefix and itself; ``None`` when only its keys and values are wanted.
            skip_und: leave the markers out after the attention (their output is not read after the last
                layer).

        Returns:
            The block after the layer (``None`` without ``attend``), and its own keys and values.
        """
        has_gen = tokens.gen is not None
        normed = Tokens(
            self.input_layernorm(tokens.und), self.input_layernorm_moe_gen(tokens.gen) if has_gen else None
        )
        cache = self.self_attn.keys_values(normed, rotary)
        if attend is None:
            return None, cache
        mixed = attend(self.self_attn.queries(normed, rotary), *cache)
        und, gen = self.self_attn.output(mixed, tokens, skip_und)
        if not skip_und:
            und = self.mlp(self.post_attention_layernorm(und), und)
        if has_gen:
            gen = self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(gen), gen)
        return Tokens(und, gen), cache


class Decoder(nn.Module):
    """Embedding, layers and final norms."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def prefill(
        self, tokens: Tokens, positions: Tensor, past: list[LayerCache] | None, causal: bool
    ) -> list[LayerCache]:
        """Run one block of a prefix and return its keys and values, appended to ``past``.

        Args:
            tokens: the block of B requests.
            positions: rotary positions int64 ``[T]``, or ``[1]`` when all tokens share one.
            past: every layer's cache before the block, ``[B, Hk, P, D]``.
            causal: text looks back only; an image block looks at all of itself.
        """
        rotary = self.rotary(positions[None])
        last = len(self.layers) - 1
        grown: list[LayerCache] = []
        for index, layer in enumerate(self.layers):
            attend = None if index == last else _prefill_attention(past[index] if past else None, causal)
            tokens, own = self._run(layer, tokens, rotary, attend)
            if past:
                own = LayerCache(
                    torch.cat((past[index].key, own.key), dim=2),
                    torch.cat((past[index].value, own.value), dim=2),
                )
            grown.append(own)
        return grown

    def denoise(
        self, tokens: Tokens, positions: Tensor, prefix: list[LayerCache], prefix_lengths: Tensor | None
    ) -> Tensor:
        """Run the denoised block of N rows on their groups' prefixes.

        Args:
            tokens: markers ``[N, 2, hidden]`` and latents ``[N, L, hidden]``.
            positions: rotary position of each row's block, int64 ``[N]``.
            prefix: every layer's cache, ``[G, Hk, P, D]``; the N / G rows of a group are contiguous.
            prefix_lengths: int ``[G]`` when the groups' prefixes differ in length, else ``None``.

        Returns:
            The latents after the final norm, ``[N, L, hidden]``.
        """
        rotary = self.rotary(positions[:, None])
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attend = _denoise_attention(prefix[index], prefix_lengths)
            tokens, _ = self._run(layer, tokens, rotary, attend, index == last)
        return self.norm_moe_gen(tokens.gen)

    def rotary(self, positions: Tensor) -> Rotary:
        """The rotation of ``positions`` of any shape."""
        return Rotary.at(positions, self.config.head_dim, self.config.rope_theta)

    def _run(
        self, layer: nn.Module, tokens: Tokens, rotary: Rotary, attend: Attend | None, skip_und: bool = False
    ) -> tuple[Tokens | None, LayerCache]:
        if self.gradient_checkpointing and torch.is_grad_enabled():
            # A layer draws no random numbers, so their state is not kept.
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(layer, tokens, rotary, attend, skip_und, **options)
        return layer(tokens, rotary, attend, skip_und)


def _prefill_attention(past: LayerCache | None, causal: bool) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if past is None:
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        mask = None
        if causal:
            tokens, before = query.shape[2], past.key.shape[2]
            mask = torch.ones(tokens, before + tokens, dtype=torch.bool, device=query.device).tril(before)
        all_keys, all_values = torch.cat((past.key, key), dim=2), torch.cat((past.value, value), dim=2)
        return F.scaled_dot_product_attention(query, all_keys, all_values, attn_mask=mask, enable_gqa=True)

    return attend


def _denoise_attention(prefix: LayerCache, prefix_lengths: Tensor | None) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sibling_prefix_attention(
            query, key, value, prefix.key, prefix.value, prefix_lengths=prefix_lengths
        )

    return attend


class LanguageModel(nn.Module):
    """The decoder and its output head, under the public checkpoint's names.

    The head is part of the weights; making images does not use it.
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
