# SPDX-License-Identifier: Apache-2.0
"""How much images of one digit differ from each other: what a generator that has collapsed onto one stroke
style loses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unirl.digits import half_a, read


def digit_diversity(images: Sequence[np.ndarray], digits: Sequence[int] | np.ndarray) -> float:
    """Mean Euclidean distance between two images of one digit, averaged over digits.

    Distances are taken at the scans' 8 x 8 size with pixels in [-1, 1], so canvases compare with each other
    and with `real_diversity`.

    Args:
        images: `[H, W, C]` in [0, 1].
        digits: the digit each image was asked to show.

    Raises:
        ValueError: no digit has two images.
    """
    seen = np.stack([read(image).ravel() for image in images]).astype(np.float64) * 2 - 1
    return _mean_distance(seen, np.asarray(digits))


def real_diversity() -> float:
    """The same number for the real scans of half A. Needs scikit-learn."""
    scans = half_a()
    return _mean_distance(
        scans.images.reshape(len(scans.labels), -1).astype(np.float64) * 2 - 1, scans.labels
    )


def _mean_distance(pixels: np.ndarray, digits: np.ndarray) -> float:
    means = []
    for digit in np.unique(digits):
        members = pixels[digits == digit]
        if len(members) > 1:
            squares = (members**2).sum(axis=1)
            between = squares[:, None] + squares[None] - 2 * members @ members.T
            above = np.triu_indices(len(members), k=1)
            means.append(np.sqrt(np.maximum(between[above], 0)).mean())
    if not means:
        raise ValueError("diversity needs at least two images of one digit; raise eval.samples_per_prompt")
    return float(np.mean(means))
