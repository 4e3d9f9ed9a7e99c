# SPDX-License-Identifier: Apache-2.0
"""The SigLIP-NaViT vision tower: any grid of patches, learned positions, full attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unirl.models.bagel.config import VisionConfig
from unirl.models.bagel.layers import Linear


class _Embeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = Linear(config.num_channels * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.num_positions, config.hidden_size)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        return self.patch_embedding(patches) + self.position_embedding(position_ids)


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self, name, Linear(config.hidden_size, config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, tokens, width = hidden.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, tokens, self.num_heads, -1).transpose(1, 2)

        query, key, value = heads(self.q_proj(hidden)), heads(self.k_proj(hidden)), heads(self.v_proj(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class _Mlp(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden), approximate="tanh"))


class VisionLayer(nn.Module):
    """One pre-norm encoder layer."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = _Attention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """``[B, tokens, hidden]`` to the same shape."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class _Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_hidden_layers))


class VisionTransformer(nn.Module):
    """Patches of one grid size to features."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = _Embeddings(config)
        self.encoder = _Encoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        """``[B, tokens, p*p*C]`` and table rows int64 ``[tokens]`` to ``[B, tokens, hidden]``."""
        hidden = self.embeddings(patches, position_ids)
        for layer in self.encoder.layers:
            hidden = layer(hidden)
        return self.post_layernorm(hidden)


class VisionTower(nn.Module):
    """Holds the transformer under the name the public checkpoint gives it."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.vision_model = VisionTransformer(config)

    def forward(self, patches: Tensor, position_ids: Tensor) -> Tensor:
        """See :meth:`VisionTransformer.forward`."""
        return self.vision_model(patches.to(self.dtype), position_ids)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.vision_model.embeddings.patch_embedding.weight.dtype
