# SPDX-License-Identifier: Apache-2.0
"""Reward: the probability of the prompted digit under a small convolutional classifier trained on half B of
the scans.

On the real scans of half A it is right for about 99 of 100 and gives their own digit a mean probability of
about .96. A generator whose mean lies above that satisfies the classifier, not the reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from unirl.assets import asset
from unirl.digits import prompted_digit, read

WEIGHTS = asset("digit_classifier.safetensors")
"""Shipped weights; `examples/digits/train_scorer.py` makes them."""

# Every forward pass has this many rows, the last ones zeros: a row's bits then do not depend on its
# neighbours.
_BATCH = 32


class DigitClassifier(nn.Module):
    """Two convolutions, a pooling and two linear layers: 60 k parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 24, 3, padding=1)
        self.conv2 = nn.Conv2d(24, 48, 3, padding=1)
        self.hidden = nn.Linear(48 * 16, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, images: Tensor, dropout: float = 0.0) -> Tensor:
        """`[N, 1, 8, 8]` in [-1, 1] to logits `[N, 10]`. `dropout` is a probability, for training."""
        features = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(images)))), 2).flatten(1)
        hidden = F.relu(self.hidden(F.dropout(features, dropout, training=dropout > 0)))
        return self.out(F.dropout(hidden, dropout, training=dropout > 0))


def scans_to_input(scans: np.ndarray) -> Tensor:
    """`[N, 8, 8]` in [0, 1] to the classifier's `[N, 1, 8, 8]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(scans, dtype=np.float32))[:, None] * 2 - 1


class DigitProbability:
    """Scores a row by the probability, in [0, 1], of the digit that its prompt or metadata names.

    Args:
        weights: a safetensors file; the shipped one by default.
    """

    name = "digit_probability"

    def __init__(self, weights: str | None = None) -> None:
        self.check(weights=weights)
        self._model = DigitClassifier().eval()
        self._model.load_state_dict(load_file(str(_path(weights))))

    @staticmethod
    def check(weights: str | None = None) -> None:
        """Raises `ValueError` when the weights are missing, without loading anything."""
        if not _path(weights).is_file():
            raise ValueError(
                f"scorer digit_probability: no weights at {_path(weights)}; set "
                "reward.scorers[].options.weights to a safetensors file, or make the shipped "
                "one with `python examples/digits/train_scorer.py`"
            )

    def score(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """One probability a row; NaN for an image with non-finite pixels. `ValueError` when a row names no
        digit.
        """
        digits = [prompted_digit(text, data) for text, data in zip(prompts, metadata, strict=True)]
        rows = self.probabilities(images)
        rows[[not np.isfinite(image).all() for image in images]] = torch.nan
        return [float(row[digit]) for row, digit in zip(rows, digits, strict=True)]

    @torch.no_grad()
    def probabilities(self, images: Sequence[np.ndarray]) -> Tensor:
        """float32 `[N, 10]` for images `[H, W, C]` in [0, 1]."""
        scans = np.stack([read(image) for image in images]) if images else np.zeros((0, 8, 8))
        inputs = scans_to_input(scans)
        rows = []
        for chunk in inputs.split(_BATCH):
            padded = F.pad(chunk, (0, 0, 0, 0, 0, 0, 0, _BATCH - len(chunk)))
            rows.append(self._model(padded).softmax(dim=-1)[: len(chunk)])
        return torch.cat(rows) if rows else torch.zeros(0, 10)

    def accuracy(self, images: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray) -> float:
        """Share of images whose most probable digit is their label."""
        guesses = self.probabilities(images).argmax(dim=-1).numpy()
        return float((guesses == np.asarray(labels)).mean())


def _path(weights: str | None) -> Path:
    return WEIGHTS if weights is None else Path(weights)
