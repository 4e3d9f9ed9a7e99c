# SPDX-License-Identifier: Apache-2.0
"""Reward: how small an image's JPEG file is, the compressibility reward of DDPO (arXiv 2305.13301)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

_BYTES_PER_KILOBYTE = 1000


class JpegCompressibility:
    """Scores a row by minus the size of its JPEG file, in kilobytes of 1000 bytes. The header's ~.3 kB are a
    constant of it.

    Args:
        quality: of the JPEG encoder, 1 to 95.
    """

    name = "jpeg_compressibility"

    def __init__(self, quality: int = 95) -> None:
        self.check(quality=quality)
        self.quality = quality

    @staticmethod
    def check(quality: int = 95) -> None:
        """Raises `ValueError` for a quality that the encoder does not have."""
        if not isinstance(quality, int) or not 1 <= quality <= 95:
            raise ValueError(
                f"scorer jpeg_compressibility: quality is {quality!r}; allowed: an integer from 1 to 95 "
                "(reward.scorers[].options.quality)"
            )

    def score(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """Minus kilobytes a row; NaN for an image with non-finite pixels."""
        return [self._score(np.asarray(image)) for image in images]

    def _score(self, image: np.ndarray) -> float:
        if not np.isfinite(image).all():
            return math.nan
        pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(
            buffer, "JPEG", quality=self.quality
        )
        return -len(buffer.getvalue()) / _BYTES_PER_KILOBYTE
