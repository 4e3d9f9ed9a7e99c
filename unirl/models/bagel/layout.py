# SPDX-License-Identifier: Apache-2.0
"""The token layout of a request: which blocks its contexts hold and where every token sits.

:func:`plan_layout` is the only place that knows the order of blocks and the rotary positions. Sampling,
replay and training all build their contexts from what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unirl.models.bagel.config import BagelConfig

CONTEXT_NAMES = ("gen", "cfg_text", "cfg_img")


@dataclass(frozen=True)
class Block:
    """A run of tokens that is prefilled at once.

    Attributes:
        kind: ``"text"`` (causal, positions increase by one), ``"vae"`` or ``"vit"`` (full attention, one
            position).
        token_ids: the text's ids with bos and eos, or the two marker ids around an image.
        grid: rows and columns of the image's tokens; ``None`` for text.
        rope_position: rotary position of the first token.
    """

    kind: str
    token_ids: tuple[int, ...]
    grid: tuple[int, int] | None
    rope_position: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the block, markers included."""
        return len(self.token_ids) + (self.grid[0] * self.grid[1] if self.grid else 0)

    @property
    def rope_advance(self) -> int:
        """How far the block moves the next rotary position: an image moves it by one."""
        return 1 if self.grid else len(self.token_ids)

    def position_ids(self) -> list[int]:
        """Rotary position of every token, in token order."""
        if self.grid:
            return [self.rope_position] * self.num_tokens
        return list(range(self.rope_position, self.rope_position + len(self.token_ids)))


@dataclass(frozen=True)
class ContextLayout:
    """The prefix of one guidance branch."""

    blocks: tuple[Block, ...]

    @property
    def kv_len(self) -> int:
        """Keys and values that the prefix holds."""
        return sum(block.num_tokens for block in self.blocks)

    @property
    def rope_offset(self) -> int:
        """Rotary position of the denoised block that follows."""
        return sum(block.rope_advance for block in self.blocks)


@dataclass(frozen=True)
class Layout:
    """Everything about a request that the transformer sees, except pixels and weights.

    Attributes:
        gen, cfg_text, cfg_img: the three contexts.
        canvas: height and width in pixels.
        grid: rows and columns of the canvas in latent tokens.
        marker_ids: the two ids around the denoised latents.
        max_latent_size: columns of the latent position table.
    """

    gen: ContextLayout
    cfg_text: ContextLayout
    cfg_img: ContextLayout
    canvas: tuple[int, int]
    grid: tuple[int, int]
    marker_ids: tuple[int, int]
    max_latent_size: int

    @property
    def num_latents(self) -> int:
        """Tokens that are denoised."""
        return self.grid[0] * self.grid[1]

    @property
    def seq_len(self) -> int:
        """Tokens of the denoised block, its two markers included."""
        return self.num_latents + 2

    def context(self, name: str) -> ContextLayout:
        """The context called ``gen``, ``cfg_text`` or ``cfg_img``."""
        return {"gen": self.gen, "cfg_text": self.cfg_text, "cfg_img": self.cfg_img}[name]

    def position_ids(self, name: str = "gen") -> torch.Tensor:
        """Rotary positions of the denoised block under one context: int64 ``[seq_len]``, all the same."""
        return torch.full((self.seq_len,), self.context(name).rope_offset, dtype=torch.int64)

    def latent_position_ids(self) -> torch.Tensor:
        """Rows of the latent position table: int64 ``[num_latents]``, row by row."""
        return grid_position_ids(self.grid, self.max_latent_size)


def grid_position_ids(grid: tuple[int, int], table_side: int) -> torch.Tensor:
    """Rows of a square position table for a grid in its corner: int64 ``[rows * columns]``."""
    rows, columns = torch.arange(grid[0]), torch.arange(grid[1])
    return (rows[:, None] * table_side + columns).flatten()


def plan_layout(
    config: BagelConfig,
    prompt_ids: Sequence[int],
    canvas: tuple[int, int],
    source: tuple[tuple[int, int], tuple[int, int]] | None = None,
    *,
    row: str = "?",
) -> Layout:
    """Plan one request.

    Text-to-image: gen = text, cfg_text = nothing, cfg_img = text. Image-to-image: gen = VAE image, ViT image,
    text; cfg_text = the two images; cfg_img = text.

    Args:
        config: the model's dimensions.
        prompt_ids: token ids of the prompt without bos and eos.
        canvas: height and width of the image to make, in pixels.
        source: for image-to-image, the (height, width) in pixels of the source as the VAE and as the ViT read
            it.
        row: the row's name, for error messages.

    Raises:
        ValueError: a canvas or a source that is no multiple of its stride or exceeds its position table, or a
            token id outside the vocabulary.
    """
    tokens = config.tokens
    for token in prompt_ids:
        if not 0 <= token < config.language.vocab_size:
            raise ValueError(
                f"row {row}: prompt token id {token} is outside the vocabulary of "
                f"{config.language.vocab_size}; was the prompt tokenized for another model?"
            )
    grid = _grid(row, "canvas", canvas, config.pixel_stride, config.max_latent_size)
    markers = (tokens.start_of_image, tokens.end_of_image)
    text = ("text", (tokens.bos_token_id, *(int(token) for token in prompt_ids), tokens.eos_token_id), None)
    images: list[tuple[str, tuple[int, ...], tuple[int, int] | None]] = []
    if source is not None:
        vae_size, vit_size = source
        patch, side = config.vision.patch_size, config.vit_max_num_patch_per_side
        vae_grid = _grid(row, "VAE source image", vae_size, config.pixel_stride, config.max_latent_size)
        images = [
            ("vae", markers, vae_grid),
            ("vit", markers, _grid(row, "ViT source image", vit_size, patch, side)),
        ]
    return Layout(
        gen=_context([*images, text]),
        cfg_text=_context(images),
        cfg_img=_context([text]),
        canvas=(int(canvas[0]), int(canvas[1])),
        grid=grid,
        marker_ids=markers,
        max_latent_size=config.max_latent_size,
    )


def _grid(row: str, what: str, size: tuple[int, int], stride: int, table_side: int) -> tuple[int, int]:
    height, width = int(size[0]), int(size[1])
    if height <= 0 or width <= 0 or height % stride or width % stride:
        raise ValueError(
            f"row {row}: {what} {height}x{width} must be a positive multiple of {stride} pixels a side"
        )
    if max(height, width) > table_side * stride:
        raise ValueError(
            f"row {row}: {what} {height}x{width} exceeds the model's position table of {table_side} x "
            f"{table_side} tokens, at most {table_side * stride} pixels a side"
        )
    return height // stride, width // stride


def _context(blocks: Sequence[tuple[str, tuple[int, ...], tuple[int, int] | None]]) -> ContextLayout:
    placed: list[Block] = []
    position = 0
    for kind, token_ids, grid in blocks:
        placed.append(Block(kind, token_ids, grid, position))
        position += placed[-1].rope_advance
    return ContextLayout(tuple(placed))
