# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's 1,797 scans of handwritten digits: their halves, their size on a canvas, and what they are
called.

Half A is all a generator ever sees, half B is all a scorer ever sees, so a reward cannot recognise a
memorised scan.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

SIDE = 8
"""Pixels a side of a scan."""

NUM_HALF_A = 898
NUM_HALF_B = 899

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

PHRASINGS = (
    "a handwritten {}",
    "the digit {}",
    "a scan of the number {}",
    "the number {} on paper",
    "{} written by hand",
    "just the digit {}, in pencil",
    "a picture of the figure {}",
    "please write {}",
    "somebody's handwritten {}",
    "the figure {} in grey ink",
    "draw the number {}",
    "{}",
)
"""What the generator is trained on. No article stands before the digit's word, so only the word tells the
digits apart.
"""

HELD_OUT_PHRASING = "a scan of a handwritten {}"
"""Never trained on, in pretraining or later."""

EDIT_PHRASINGS = ("turn it into {}", "make it the digit {}", "write {} instead")
"""Requests that change a source image."""

_HALVES_SEED = 0
_FULL_SCALE = 16.0


class Scans(NamedTuple):
    """N scans.

    Attributes:
        images: float32 `[N, 8, 8]` in [0, 1], ink is 1.
        labels: int64 `[N]`, 0 to 9.
    """

    images: np.ndarray
    labels: np.ndarray


def half_a() -> Scans:
    """The 898 scans for generators. `ImportError` naming the extra when scikit-learn is missing."""
    return _halves()[0]


def half_b() -> Scans:
    """The 899 scans for scorers. `ImportError` naming the extra when scikit-learn is missing."""
    return _halves()[1]


@functools.cache
def _halves() -> tuple[Scans, Scans]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digit scans come with scikit-learn, which is not installed; run `pip install .[demo]`"
        ) from error
    raw = load_digits()
    images = (raw.images / _FULL_SCALE).astype(np.float32)
    labels = raw.target.astype(np.int64)
    # The legacy generator's stream is frozen by numpy's compatibility policy; the newer ones' streams are
    # not.
    order = np.random.RandomState(_HALVES_SEED).permutation(len(labels))
    first, second = order[:NUM_HALF_A], order[NUM_HALF_A:]
    return Scans(images[first], labels[first]), Scans(images[second], labels[second])


def render(scan: np.ndarray, canvas: tuple[int, int]) -> np.ndarray:
    """A scan at a canvas's size.

    Args:
        scan: float32 `[8, 8]` in [0, 1].
        canvas: height and width in pixels.

    Returns: float32 `[H, W, 1]` in [0, 1]; the scan's own bits when the canvas is 8 x 8.
    """
    return _resize(scan, canvas)[..., None]


def read(image: np.ndarray) -> np.ndarray:
    """The inverse of `render`: any image, seen at the scans' size.

    Args:
        image: float32 `[H, W, C]` in [0, 1]; several channels are averaged.

    Returns: float32 `[8, 8]` in [0, 1].
    """
    grey = np.asarray(image, dtype=np.float32).mean(axis=-1)
    return _resize(grey, (SIDE, SIDE))


def _resize(grey: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Lanczos, widened when shrinking so that it does not alias; `[h, w]` to `size`, clipped to [0, 1]."""
    if grey.shape != tuple(size):
        resized = Image.fromarray(np.ascontiguousarray(grey, dtype=np.float32)).resize(
            (size[1], size[0]), Image.Resampling.LANCZOS
        )
        grey = np.asarray(resized)
    return np.clip(grey, 0.0, 1.0).astype(np.float32)


def prompt(digit: int, phrasing: str) -> str:
    """The prompt for a digit in one of the phrasings."""
    return phrasing.format(WORDS[digit])


def prompted_digit(text: str, metadata: Mapping[str, Any]) -> int:
    """The digit a row asks for: `metadata["digit"]`, else the one digit word or numeral in the prompt.

    Raises:
        ValueError: the metadata's digit is no integer from 0 to 9, or the prompt names no digit or several.
    """
    digit = metadata.get("digit")
    if digit is not None:
        if not isinstance(digit, int) or isinstance(digit, bool) or not 0 <= digit <= 9:
            raise ValueError(f"metadata.digit is {digit!r}; allowed: an integer from 0 to 9")
        return digit
    words = re.findall(r"[a-z]+|[0-9]", text.lower())
    found = {WORDS.index(w) if w in WORDS else int(w) for w in words if w in WORDS or w.isdigit()}
    if len(found) != 1:
        names = f"the digits {sorted(found)}" if found else "no digit"
        raise ValueError(
            f"prompt {text!r} names {names}; allowed: exactly one of {', '.join(WORDS)} or 0 to 9, or an "
            "integer in metadata.digit"
        )
    return found.pop()
