# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from unirl.metrics import read_samples, write_samples


@pytest.mark.parametrize("canvases", [[(8, 8)] * 3, [(8, 8), (12, 8), (8, 8)]])
def test_samples_come_back_in_row_order_whatever_their_canvases(
    tmp_path: Path, canvases: list[tuple[int, int]]
) -> None:
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (height, width, 1), dtype=np.uint8) for height, width in canvases]
    path = write_samples(
        tmp_path / "samples" / "eval_000000.npz",
        images,
        ["a", "b<", "ü"],
        ["e/0", "e/1", "e/2"],
        [0.5, math.nan, 1],
    )
    back = read_samples(path)
    assert [image.shape[:2] for image in back.images] == canvases
    assert all(np.array_equal(got, want) for got, want in zip(back.images, images, strict=True))
    assert back.prompts == ("a", "b<", "ü") and back.ids == ("e/0", "e/1", "e/2")
    assert back.scores[0] == 0.5 and math.isnan(back.scores[1]) and back.scores[2] == 1
    assert [entry.name for entry in path.parent.iterdir()] == ["eval_000000.npz"]


def test_float_images_are_rounded_to_the_nearest_of_256_levels(tmp_path: Path) -> None:
    image = np.array([[0.0, 0.5, 1.0, 1.7, -1.0, math.nan, 100.4 / 255, 100.6 / 255]], dtype=np.float32)
    path = write_samples(tmp_path / "s.npz", [image], ["p"], ["i"], [0.0])
    assert read_samples(path).images[0][..., 0].tolist() == [[0, 128, 255, 255, 0, 0, 100, 101]]


def test_lengths_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'prompts': 2"):
        write_samples(tmp_path / "s.npz", [np.zeros((2, 2, 1), np.uint8)], ["a", "b"], ["i"], [0.0])
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_sample_set_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"broken\.npz"):
        read_samples(tmp_path / "broken.npz")
    np.savez(tmp_path / "other.npz", images=np.zeros((1, 2, 2, 1), np.uint8))
    with pytest.raises(ValueError, match="has no prompts, ids, scores"):
        read_samples(tmp_path / "other.npz")


def test_a_damaged_sample_set_is_named_without_advice_to_unpickle_it(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    images = [np.zeros((4 + row, 4, 1), np.uint8) for row in range(2)]
    write_samples(path, images, ["a", "b"], ["i", "j"], [0.0, 1.0])
    whole = path.read_bytes()
    middle = len(whole) // 4
    flipped = (
        whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 40]) + whole[middle + 40 :]
    )
    for damaged in (b"", whole[: len(whole) // 2], flipped):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"s\.npz is no readable npz of samples") as caught:
            read_samples(path)
        assert "pickle" not in str(caught.value)
    arrays = {name: np.zeros(2) for name in ("prompts", "ids", "scores", "images_4x4")}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"s\.npz has no rows_4x4"):
        read_samples(path)
