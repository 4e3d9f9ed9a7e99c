# SPDX-License-Identifier: Apache-2.0
"""Monitor: whether a support vector machine, fitted on half B of the scans, reads the prompted digit.

It is another kind of classifier than the reward's, and is never trained on: a generator that learns the
reward's blind spots raises the reward and not this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unirl.digits import half_b, prompted_digit, read

_PENALTY = 10.0


class DigitJudge:
    """Scores a row 1 when the machine reads the digit that its prompt or metadata names, else 0.

    Fits 899 scans when it is made, in about .1 s. Needs scikit-learn (the `demo` extra).
    """

    name = "digit_judge"

    def __init__(self) -> None:
        scans = half_b()
        from sklearn.svm import SVC

        self._machine = SVC(C=_PENALTY, kernel="rbf", gamma="scale")
        self._machine.fit(scans.images.reshape(len(scans.labels), -1), scans.labels)

    @staticmethod
    def check() -> None:
        """Raises `ImportError` naming the extra when scikit-learn is missing."""
        half_b()

    def score(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        """0 or 1 a row; NaN for an image with non-finite pixels. `ValueError` when a row names no digit."""
        digits = [prompted_digit(text, data) for text, data in zip(prompts, metadata, strict=True)]
        finite = [bool(np.isfinite(image).all()) for image in images]
        guesses = iter(self.guesses([image for image, ok in zip(images, finite, strict=True) if ok]))
        return [
            float(next(guesses) == digit) if ok else math.nan
            for ok, digit in zip(finite, digits, strict=True)
        ]

    def guesses(self, images: Sequence[np.ndarray]) -> list[int]:
        """The digit read in each image `[H, W, C]` in [0, 1]."""
        if not images:
            return []
        return [
            int(guess) for guess in self._machine.predict(np.stack([read(image).ravel() for image in images]))
        ]

    def accuracy(self, images: Sequence[np.ndarray], labels: Sequence[int] | np.ndarray) -> float:
        """Share of images that are read as their label."""
        return float((np.asarray(self.guesses(images)) == np.asarray(labels)).mean())
