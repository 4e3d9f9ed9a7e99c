# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest

from unirl.report.grids import grid_image


def find(sheet: np.ndarray, block: np.ndarray) -> list[tuple[int, int]]:
    """Where `block` occurs exactly in `sheet`, as (top, left)."""
    windows = np.lib.stride_tricks.sliding_window_view(sheet, block.shape)[:, :, 0]
    return [(int(top), int(left)) for top, left in np.argwhere((windows == block).all(axis=(2, 3, 4)))]


def enlarged(image: np.ndarray, factor: int) -> np.ndarray:
    return np.repeat(np.repeat(np.repeat(image, 3, axis=2), factor, axis=0), factor, axis=1)


def test_tiny_images_are_enlarged_by_one_whole_factor_without_smoothing() -> None:
    random = np.random.default_rng(0)
    small, tall = (random.integers(0, 256, (height, 8, 1), dtype=np.uint8) for height in (8, 12))
    sheet = np.asarray(grid_image([small, tall], ["a", "a"], [0.5, math.nan]))
    ((small_top, small_left),) = find(sheet, enlarged(small, 6))  # ceil(64 / 12) for both
    ((tall_top, tall_left),) = find(sheet, enlarged(tall, 6))
    assert small_top == tall_top and tall_left > small_left + 8 * 6


def test_a_line_a_prompt_in_order_of_first_appearance() -> None:
    images = [np.full((64, 64, 3), shade, np.uint8) for shade in (10, 20, 30, 40)]
    sheet = np.asarray(grid_image(images, ["b", "a", "b", "a"]))
    places = [find(sheet, image)[0] for image in images]
    assert places[0][0] == places[2][0] < places[1][0] == places[3][0]
    assert places[0][1] == places[1][1] < places[2][1] == places[3][1]


def test_no_more_prompts_and_images_than_asked_for() -> None:
    images = [np.full((64, 64, 1), shade, np.uint8) for shade in range(10, 22)]
    prompts = [f"prompt {row // 4}" for row in range(12)]
    sheet = np.asarray(grid_image(images, prompts, max_rows=2, max_columns=3))
    shown = [row for row, image in enumerate(images) if find(sheet, np.repeat(image, 3, axis=2))]
    assert shown == [0, 1, 2, 4, 5, 6]


def test_nothing_to_show_and_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        grid_image([], [])
    with pytest.raises(ValueError, match="1 images, 2 prompts"):
        grid_image([np.zeros((2, 2, 1), np.uint8)], ["a", "b"])
