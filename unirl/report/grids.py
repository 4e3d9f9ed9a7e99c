# SPDX-License-Identifier: Apache-2.0
"""Labelled grids of samples: a line a prompt, a column a seed, tiny images enlarged without smoothing."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from unirl.metrics import SampleSet

_TARGET_SIDE = 64
_LABEL_WIDTH = 150
_GAP = 6
_SCORE_HEIGHT = 14
_BACKGROUND = (255, 255, 255)
_INK = (40, 40, 40)
_FRAME = (190, 190, 190)


def grid_image(
    images: Sequence[np.ndarray],
    prompts: Sequence[str],
    scores: Sequence[float] | None = None,
    *,
    max_rows: int = 10,
    max_columns: int = 8,
) -> Image.Image:
    """One picture of N images: those of a prompt side by side, prompts below each other in order of first
    appearance.

    Args:
        images: N uint8 `[H, W, 1]` or `[H, W, 3]`, sizes may differ. Images whose longer side is under 64
            pixels are enlarged by a
            whole factor, nearest neighbour, one factor for the whole grid, so that canvases stay comparable.
        prompts: N texts, written at the left of each line.
        scores: N numbers, written under each image; NaN is written as n/a.
        max_rows: prompts shown at most.
        max_columns: images a prompt shown at most.
    """
    if len(images) != len(prompts) or (scores is not None and len(scores) != len(images)):
        raise ValueError(
            f"{len(images)} images, {len(prompts)} prompts; allowed: one prompt (and score) an image"
        )
    if not images:
        raise ValueError("there are no images to show")
    lines: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        lines.setdefault(prompt, []).append(row)
    shown = [(prompt, rows[:max_columns]) for prompt, rows in list(lines.items())[:max_rows]]
    used = [row for _, rows in shown for row in rows]
    factor = max(1, math.ceil(_TARGET_SIDE / max(max(images[row].shape[:2]) for row in used)))
    cell_width = factor * max(images[row].shape[1] for row in used)
    score_height = _SCORE_HEIGHT if scores is not None else 0
    heights = [
        max(factor * max(images[row].shape[0] for row in rows), _SCORE_HEIGHT * 2) + score_height
        for _, rows in shown
    ]
    columns = max(len(rows) for _, rows in shown)
    width = _LABEL_WIDTH + columns * (cell_width + _GAP) + _GAP
    sheet = Image.new("RGB", (width, sum(heights) + _GAP * (len(heights) + 1)), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(11)
    top = _GAP
    for (prompt, rows), height in zip(shown, heights, strict=True):
        _draw_label(draw, prompt, top, height, font)
        for column, row in enumerate(rows):
            left = _LABEL_WIDTH + column * (cell_width + _GAP)
            picture = _enlarged(images[row], factor)
            sheet.paste(picture, (left, top))
            draw.rectangle((left - 1, top - 1, left + picture.width, top + picture.height), outline=_FRAME)
            if scores is not None:
                text = f"{scores[row]:.2f}" if math.isfinite(scores[row]) else "n/a"
                draw.text((left, top + picture.height + 1), text, fill=_INK, font=font)
        top += height + _GAP
    return sheet


def write_grid(samples: SampleSet, path: Path, *, max_rows: int = 10, max_columns: int = 8) -> Path:
    """Draws `grid_image` of a stored sample set as PNG."""
    scores = samples.scores if any(math.isfinite(score) for score in samples.scores) else None
    picture = grid_image(samples.images, samples.prompts, scores, max_rows=max_rows, max_columns=max_columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
    return path


def _enlarged(image: np.ndarray, factor: int) -> Image.Image:
    channels = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
    picture = Image.fromarray(np.ascontiguousarray(channels))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _draw_label(
    draw: ImageDraw.ImageDraw,
    prompt: str,
    top: int,
    height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    lines = textwrap.wrap(prompt, 24)[: max(1, height // _SCORE_HEIGHT)] or ["(empty prompt)"]
    for index, line in enumerate(lines):
        draw.text((_GAP, top + index * _SCORE_HEIGHT), line, fill=_INK, font=font)
