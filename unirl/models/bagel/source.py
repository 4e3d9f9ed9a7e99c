# SPDX-License-Identifier: Apache-2.0
"""A source image, from the dataset's bytes to the two forms the model reads."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unirl.models.bagel.config import BagelConfig


def fitted_size(size: tuple[int, int], longest: int, shortest: int, stride: int) -> tuple[int, int]:
    """Height and width after resizing: the longest side at most ``longest``, the shortest at least
    ``shortest`` where that is possible, the shape kept, both sides multiples of ``stride``.

    An image that fits already keeps its size up to the rounding.
    """
    scale = min(longest / max(size), 1.0)
    scale = max(scale, shortest / min(size))
    scale = min(scale, longest / max(size))
    limit = longest // stride * stride
    height, width = (min(max(round(side * scale / stride) * stride, stride), limit) for side in size)
    return height, width


def source_sizes(config: BagelConfig, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) of a source of ``size`` as the VAE and as the ViT read it: the planner's ``source``."""
    vae = fitted_size(size, *config.source.vae, config.pixel_stride)
    return vae, fitted_size(size, *config.source.vit, config.vision.patch_size)


def source_pixels(config: BagelConfig, image: np.ndarray) -> tuple[Tensor, Tensor]:
    """Resize for both readers.

    Args:
        image: uint8 ``[H, W, 1]`` or ``[H, W, 3]``.

    Returns:
        float32 pixels in [-1, 1], ``[c, H, W]`` for the VAE and for the ViT.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ValueError(
            f"a source image must be uint8 [H, W, 1] or [H, W, 3]; got {image.dtype} {list(image.shape)}"
        )
    picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    vae_size, vit_size = source_sizes(config, image.shape[:2])
    return (
        _resized(picture, vae_size, config.latent.image_channels),
        _resized(picture, vit_size, config.vision.num_channels),
    )


def image_key(image: np.ndarray) -> bytes:
    """Equal for equal images, shape included."""
    return hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).digest()


def _resized(picture: Image.Image, size: tuple[int, int], channels: int) -> Tensor:
    picture = picture.convert("L" if channels == 1 else "RGB")
    if picture.size != (size[1], size[0]):
        picture = picture.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    values = torch.from_numpy(np.array(picture, dtype=np.float32)).reshape(size[0], size[1], channels)
    return (values / 127.5 - 1.0).permute(2, 0, 1).contiguous()
