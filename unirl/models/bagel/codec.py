# SPDX-License-Identifier: Apache-2.0
"""Latent codecs: pixels in [-1, 1] to the latents that are denoised, and back."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from unirl.models.bagel.config import BagelConfig, LatentConfig
from unirl.models.bagel.layers import patchify, unpatchify

FLUX_AUTOENCODER: dict[str, Any] = {
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "force_upcast": True,
    "in_channels": 3,
    "latent_channels": 16,
    "layers_per_block": 2,
    "mid_block_add_attention": True,
    "norm_num_groups": 32,
    "out_channels": 3,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": False,
    "use_quant_conv": False,
}
"""diffusers' AutoencoderKL in the configuration of FLUX.1's autoencoder, which BAGEL uses."""


class Codec(Protocol):
    """Turns pixels into latents and back."""

    def encode(self, pixels: Tensor) -> Tensor:
        """``[B, c, H, W]`` in [-1, 1] to ``[B, z, H/d, W/d]``."""

    def decode(self, latents: Tensor) -> Tensor:
        """The inverse; pixels are not clamped."""


class PixelCodec:
    """The image is its own latent."""

    def encode(self, pixels: Tensor) -> Tensor:
        """The pixels themselves."""
        return pixels

    def decode(self, latents: Tensor) -> Tensor:
        """The latents themselves."""
        return latents


class FluxCodec:
    """FLUX's variational autoencoder.

    Encoding takes the posterior's mean, where the public inference code draws a sample: a source image then
    has one latent, wherever and however often it is encoded.
    """

    def __init__(self, autoencoder: Any, config: LatentConfig) -> None:
        self.autoencoder = autoencoder.eval().requires_grad_(False)
        self.config = config

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """``[B, 3, H, W]`` in [-1, 1] to scaled latents ``[B, 16, H/8, W/8]``."""
        weights = next(self.autoencoder.parameters())
        mean = self.autoencoder.encode(pixels.to(weights)).latent_dist.mode()
        return ((mean.float() - self.config.shift_factor) * self.config.scale_factor).to(pixels.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents ``[B, 16, h, w]`` to pixels ``[B, 3, 8h, 8w]``."""
        weights = next(self.autoencoder.parameters())
        raw = latents.float() / self.config.scale_factor + self.config.shift_factor
        return self.autoencoder.decode(raw.to(weights)).sample.to(latents.dtype)


def load_codec(
    config: BagelConfig,
    folder: str | Path | None,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Codec:
    """The codec that ``config.latent.codec`` names.

    FLUX's weights are read from ``folder``: a diffusers folder ``vae/``, or the public checkpoint's
    ``ae.safetensors``.

    Raises:
        ValueError: neither is there.
    """
    if config.latent.codec == "pixel":
        return PixelCodec()
    from diffusers import AutoencoderKL  # heavy, and only this codec needs it

    if folder is None:
        raise ValueError(
            "latent.codec 'flux' needs the checkpoint folder that holds ae.safetensors or vae/; it is None"
        )
    diffusers_folder, single_file = Path(folder) / "vae", Path(folder) / "ae.safetensors"
    if diffusers_folder.is_dir():
        autoencoder = AutoencoderKL.from_pretrained(diffusers_folder, local_files_only=True)
    elif single_file.is_file():
        # diffusers converts the original names itself once it is told the configuration, here from a local
        # folder.
        with tempfile.TemporaryDirectory() as described:
            (Path(described) / "config.json").write_text(json.dumps(FLUX_AUTOENCODER))
            autoencoder = AutoencoderKL.from_single_file(
                str(single_file), config=described, local_files_only=True
            )
    else:
        raise ValueError(f"no VAE weights: neither {single_file} nor {diffusers_folder}/ exists")
    return FluxCodec(autoencoder.to(device=device, dtype=dtype), config.latent)


def latents_to_tokens(config: BagelConfig, latents: Tensor) -> Tensor:
    """``[B, z, h, w]`` to ``[B, L, C]``."""
    return patchify(latents, config.latent_patch_size)


def tokens_to_latents(config: BagelConfig, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """``[B, L, C]`` on a grid of latent tokens to ``[B, z, h, w]``."""
    return unpatchify(tokens, grid, config.latent_patch_size)
