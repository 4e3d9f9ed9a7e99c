# SPDX-License-Identifier: Apache-2.0
"""One metric value, whatever made it: Python, numpy or torch scalars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

Scalar = float | int | str | None


def to_scalar(name: str, value: Any) -> Scalar:
    """A Python float, int, str or None. Raises `ValueError` for anything with more than one element."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, np.generic):
        return to_scalar(name, value.item())
    if isinstance(value, (np.ndarray, torch.Tensor)):
        if math.prod(value.shape) != 1:
            raise ValueError(
                f"metric {name!r} is an array of shape {list(value.shape)}; allowed: one number a name"
            )
        return to_scalar(name, value.item())
    raise ValueError(f"metric {name!r} is {type(value).__name__}; allowed: a number, text or None")


def is_finite_number(value: Any) -> bool:
    """Whether `value` is a number that can be plotted."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
