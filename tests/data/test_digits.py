# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys

import numpy as np
import pytest

from unirl import digits
from unirl.digits import (
    EDIT_PHRASINGS,
    HELD_OUT_PHRASING,
    PHRASINGS,
    WORDS,
    half_a,
    half_b,
    prompted_digit,
    read,
    render,
)


def test_halves_are_disjoint_and_cover_all_1797_scans():
    from sklearn.datasets import load_digits

    def keys(images: np.ndarray) -> list[bytes]:
        return [np.round(image * 16).astype(np.uint8).tobytes() for image in images]

    first, second = half_a(), half_b()
    assert (len(first.labels), len(second.labels)) == (898, 899)
    everything = sorted(image.astype(np.uint8).tobytes() for image in load_digits().images)
    assert sorted(keys(first.images) + keys(second.images)) == everything
    for scans in (first, second):
        assert scans.images.dtype == np.float32 and scans.images.min() == 0 and scans.images.max() == 1
        # Every digit is about a tenth of each half (the data set has 174 to 183 of each).
        assert np.bincount(scans.labels).min() > 70


def test_render_at_the_scans_own_size_changes_no_bit():
    scan = half_a().images[0]
    assert np.array_equal(render(scan, (8, 8))[..., 0], scan)
    assert np.array_equal(read(render(scan, (8, 8))), scan)


@pytest.mark.parametrize("canvas", [(12, 12), (12, 8), (8, 12), (16, 16)])
def test_read_undoes_render_but_for_a_slight_blur(canvas):
    errors = []
    for scan in half_a().images[:100]:
        image = render(scan, canvas)
        assert image.shape == (*canvas, 1) and image.dtype == np.float32
        assert image.min() >= 0 and image.max() <= 1
        errors.append(np.abs(read(image) - scan).mean())
    # Two neighbouring scans of one digit differ by about .12 a pixel.
    assert np.mean(errors) < 0.05


def test_a_constant_image_stays_constant_at_every_size():
    assert np.allclose(render(np.full((8, 8), 0.25, np.float32), (12, 8)), 0.25, atol=1e-6)
    assert np.allclose(read(np.full((12, 8, 3), 0.25, np.float32)), 0.25, atol=1e-6)


def test_read_averages_channels():
    image = np.zeros((8, 8, 3), np.float32)
    image[..., 0] = 0.9
    assert np.allclose(read(image), 0.3)


def test_held_out_phrasing_is_no_trained_one_and_all_spell_the_digit_alike():
    assert HELD_OUT_PHRASING not in PHRASINGS + EDIT_PHRASINGS
    assert len(set(PHRASINGS)) >= 6
    for phrasing in (*PHRASINGS, *EDIT_PHRASINGS, HELD_OUT_PHRASING):
        for digit, word in enumerate(WORDS):
            text = digits.prompt(digit, phrasing)
            assert text.count(word) == 1
            assert prompted_digit(text, {}) == digit


def test_prompted_digit_reads_metadata_first_then_words_and_numerals():
    assert prompted_digit("a handwritten three", {"digit": 7}) == 7
    assert prompted_digit("A Handwritten THREE, please", {}) == 3
    assert prompted_digit("draw a 4", {}) == 4
    assert prompted_digit("seven, that is 7", {}) == 7


@pytest.mark.parametrize(
    ("text", "metadata", "message"),
    [
        ("a cat", {}, "names no digit"),
        ("someone in the often", {}, "names no digit"),
        ("a three or a five", {}, r"names the digits \[3, 5\]"),
        ("a three", {"digit": 10}, "metadata.digit is 10"),
        ("a three", {"digit": "3"}, "metadata.digit is '3'"),
    ],
)
def test_a_prompt_that_names_not_one_digit_is_an_error(text, metadata, message):
    with pytest.raises(ValueError, match=message):
        prompted_digit(text, metadata)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digits._halves.cache_clear()
    with pytest.raises(ImportError, match=r"pip install \.\[demo\]"):
        half_a()
    digits._halves.cache_clear()
