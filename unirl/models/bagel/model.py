# SPDX-License-Identifier: Apache-2.0
"""BAGEL: the language model with its latent, vision and time embeddings, and the velocity it predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.layers import (
    Connector,
    Linear,
    PositionEmbedding,
    RMSNorm,
    TimestepEmbedder,
    make_batch_invariant,
    patchify,
)
from unirl.models.bagel.layout import grid_position_ids
from unirl.models.bagel.transformer import LanguageModel, Tokens
from unirl.models.bagel.vit import VisionTower

if TYPE_CHECKING:
    from unirl.models.bagel.context import Contexts


class Bagel(nn.Module):
    """The model without its VAE. Attribute names are the public checkpoint's tensor names.

    Args:
        config: dimensions.

    Attributes:
        gradient_checkpointing: recompute each decoder layer in the backward pass.
    """

    def __init__(self, config: BagelConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.language.hidden_size
        self.language_model = LanguageModel(config.language)
        self.time_embedder = TimestepEmbedder(hidden, config.timestep_scale)
        self.vae2llm = Linear(config.latent_channels, hidden)
        self.llm2vae = Linear(hidden, config.latent_channels)
        self.latent_pos_embed = PositionEmbedding(config.max_latent_size, hidden)
        self.vit_model = VisionTower(config.vision)
        self.connector = Connector(config.vision.hidden_size, hidden)
        self.vit_pos_embed = PositionEmbedding(config.vit_max_num_patch_per_side, hidden)
        make_batch_invariant(self, config.batch_invariant)
        self._marker_ids: Tensor | None = None

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether decoder layers are recomputed in the backward pass."""
        return self.language_model.model.gradient_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enabled: bool) -> None:
        self.language_model.model.gradient_checkpointing = enabled

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.vae2llm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.vae2llm.weight.dtype

    def velocity(
        self,
        latents: Tensor,
        time: Tensor,
        contexts: Contexts,
        *,
        siblings: int,
        latent_position_ids: Tensor,
        which: str = "gen",
    ) -> Tensor:
        """Velocity (noise minus data) of every row under one context.

        Args:
            latents: ``[N, L, C]``, rows of a group contiguous, all on one canvas.
            time: ``[N]`` in [0, 1]; rows may differ.
            contexts: of the ``N / siblings`` groups, in the rows' order.
            siblings: rows a group.
            latent_position_ids: rows of the latent position table, int64 ``[L]``.
            which: ``"gen"``, ``"cfg_text"`` or ``"cfg_img"``.

        Returns:
            float32 ``[N, L, C]``.
        """
        rows, context = latents.shape[0], contexts.of(which)
        if rows != siblings * context.num_groups:
            raise ValueError(
                f"velocity of {rows} rows with siblings={siblings} needs contexts of "
                f"{rows / siblings:g} groups; these are of {context.num_groups}"
            )
        tokens = self._latent_block(self.marker_ids, latents, time, latent_position_ids)
        positions = context.rope_offsets.repeat_interleave(siblings)
        hidden = self.language_model.model.denoise(tokens, positions, context.layers, context.prefix_lengths)
        return self.llm2vae(hidden).float()

    def text_block(self, token_ids: Tensor) -> Tokens:
        """Ids ``[B, T]``, bos and eos included, as a block."""
        return Tokens(self.language_model.model.embed_tokens(token_ids))

    def vae_block(self, marker_ids: Tensor, latents: Tensor, grid: tuple[int, int]) -> Tokens:
        """Source latents ``[B, z, h, w]`` between markers (ids ``[2]``): clean latents, at time 0."""
        packed = patchify(latents, self.config.latent_patch_size)
        positions = grid_position_ids(grid, self.config.max_latent_size).to(self.device)
        return self._latent_block(marker_ids, packed, packed.new_zeros(packed.shape[0]), positions)

    def vit_block(self, marker_ids: Tensor, pixels: Tensor, grid: tuple[int, int]) -> Tokens:
        """Source pixels ``[B, c, H, W]`` in [-1, 1] as vision features between markers (ids ``[2]``)."""
        positions = grid_position_ids(grid, self.config.vit_max_num_patch_per_side).to(self.device)
        features = self.vit_model(patchify(pixels, self.config.vision.patch_size), positions)
        features = self.connector(features) + self.vit_pos_embed(positions)
        markers = self._embedded(marker_ids, pixels.shape[0])
        return Tokens(torch.cat((markers[:, :1], features, markers[:, 1:]), dim=1))

    def initialize(self, seed: int) -> None:
        """Fresh weights, a function of ``seed``: normal of std 0.02, zero biases and a zero output layer."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, (nn.Linear, nn.Embedding)):
                    module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.02)
                    if getattr(module, "bias", None) is not None:
                        module.bias.zero_()
                elif isinstance(module, (RMSNorm, nn.LayerNorm)):
                    module.weight.fill_(1.0)
                elif isinstance(module, PositionEmbedding):
                    module.reset_parameters()
            self.llm2vae.weight.zero_()

    @property
    def marker_ids(self) -> Tensor:
        """Start-of-image and end-of-image ids, int64 ``[2]`` on the model's device."""
        # Kept, as a copy to a GPU waits for all that was launched before it.
        if self._marker_ids is None or self._marker_ids.device != self.device:
            ids = [self.config.tokens.start_of_image, self.config.tokens.end_of_image]
            with torch.inference_mode(False):  # training reads them too
                self._marker_ids = torch.tensor(ids, device=self.device)
        return self._marker_ids

    def _latent_block(
        self, marker_ids: Tensor, latents: Tensor, time: Tensor, position_ids: Tensor
    ) -> Tokens:
        embedded = self.vae2llm(latents.to(self.dtype)) + self.latent_pos_embed(position_ids)
        return Tokens(
            self._embedded(marker_ids, latents.shape[0]), embedded + self.time_embedder(time)[:, None]
        )

    def _embedded(self, ids: Tensor, rows: int) -> Tensor:
        return self.language_model.model.embed_tokens(ids)[None].expand(rows, -1, -1)
