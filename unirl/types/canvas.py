# SPDX-License-Identifier: Apache-2.0
"""The output size of a row, and the checks that a canvas has to pass before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Canvas(NamedTuple):
    """Height and width in pixels."""

    height: int
    width: int

    @classmethod
    def parse(cls, value: Any, where: str) -> Canvas:
        """`[H, W]` of positive integers; anything else is a `ValueError` that names `where` it stood."""
        ok = (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) == 2
            and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
        )
        if not ok:
            raise ValueError(
                f"{where}: canvas is {value!r}; allowed: [height, width], two positive integers (pixels)"
            )
        return cls(int(value[0]), int(value[1]))

    def tokens(self, pixel_stride: int) -> int:
        """Number of image tokens when one token covers `pixel_stride` x `pixel_stride` pixels."""
        return (self.height // pixel_stride) * (self.width // pixel_stride)


def check_canvases(
    ids: Sequence[str],
    canvases: Sequence[Canvas],
    bound: Canvas,
    *,
    pixel_stride: int,
    max_side: int,
    key: str = "metadata.canvas",
) -> None:
    """Raises `ValueError` naming row, canvas and bound.

    Args:
        ids, canvases: one a row.
        bound: `sampling.height/width`, the storage bound: no row may have more tokens.
        pixel_stride: pixels a token a side; every canvas must be a multiple of it.
        max_side: the longest side, in tokens, of the model's position table.
        key: what the user sets the canvases by.
    """
    bound_tokens = bound.tokens(pixel_stride)
    for row_id, canvas in zip(ids, canvases, strict=True):
        asked = f"row {row_id!r}: canvas {list(canvas)}"
        if canvas.height % pixel_stride or canvas.width % pixel_stride:
            raise ValueError(
                f"{asked} is not a multiple of the model's pixel stride {pixel_stride}; change {key}"
            )
        if max(canvas) // pixel_stride > max_side:
            raise ValueError(
                f"{asked} needs {max(canvas) // pixel_stride} positions a side; the model's position table has "
                f"{max_side} (at most {max_side * pixel_stride} pixels a side); change {key}"
            )
        if canvas.tokens(pixel_stride) > bound_tokens:
            raise ValueError(
                f"{asked} has {canvas.tokens(pixel_stride)} tokens; the storage bound sampling.height/width "
                f"{list(bound)} has {bound_tokens}; make the canvas smaller or raise sampling.height/width"
            )
