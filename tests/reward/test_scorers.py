# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from unirl.data import CANVASES
from unirl.digits import WORDS, half_a, render
from unirl.protocols import Scorer
from unirl.reward import DigitJudge, DigitProbability, JpegCompressibility, digit_diversity, real_diversity


@pytest.fixture(scope="module")
def probability():
    return DigitProbability()


@pytest.fixture(scope="module")
def judge():
    return DigitJudge()


@pytest.mark.parametrize("canvas", CANVASES)
def test_both_classifiers_read_98_of_100_real_scans_of_the_half_they_never_saw(probability, judge, canvas):
    scans = half_a()
    images = [render(scan, canvas) for scan in scans.images]
    assert probability.accuracy(images, scans.labels) > 0.975
    assert judge.accuracy(images, scans.labels) > 0.98
    scores = probability.score(images, [WORDS[label] for label in scans.labels], [{}] * len(images))
    assert 0.94 < np.mean(scores) < 0.98


def test_reward_is_the_probability_of_the_prompted_digit(probability):
    scans = half_a()
    image = render(scans.images[0], (8, 8))
    rows = probability.probabilities([image])
    scores = probability.score([image] * 10, list(WORDS), [{}] * 10)
    assert np.allclose(scores, rows[0].numpy()) and math.isclose(sum(scores), 1, abs_tol=1e-5)
    assert int(np.argmax(scores)) == scans.labels[0]


def test_a_rows_score_does_not_depend_on_its_batch(probability):
    images = [render(scan, (12, 8)) for scan in half_a().images[:70]]
    together = probability.probabilities(images)
    for row in (0, 31, 32, 69):
        assert torch.equal(probability.probabilities([images[row]])[0], together[row])


def test_judge_scores_1_for_the_prompted_digit_and_0_for_any_other(judge):
    scans = half_a()
    image = render(scans.images[0], (8, 8))
    scores = judge.score([image] * 10, list(WORDS), [{}] * 10)
    assert scores == [float(digit == scans.labels[0]) for digit in range(10)]


def test_three_channels_score_as_one(probability, judge):
    image = render(half_a().images[3], (8, 8))
    colour = np.repeat(image, 3, axis=-1)
    assert np.allclose(probability.probabilities([image]), probability.probabilities([colour]), atol=1e-5)
    assert judge.guesses([image]) == judge.guesses([colour])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_image_with_non_finite_pixels_is_missing_and_its_neighbour_is_not(probability, judge, bad):
    good = render(half_a().images[0], (12, 12))
    broken = good.copy()
    broken[3, 3, 0] = bad
    for scorer in (probability, judge, JpegCompressibility()):
        first, second = scorer.score([broken, good], ["three"] * 2, [{}] * 2)
        assert math.isnan(first) and math.isfinite(second)


def test_a_prompt_without_a_digit_is_an_error(probability, judge):
    image = render(half_a().images[0], (8, 8))
    for scorer in (probability, judge):
        with pytest.raises(ValueError, match="names no digit"):
            scorer.score([image], ["a cat"], [{}])


def test_jpeg_compressibility_is_minus_the_files_kilobytes():
    generator = np.random.default_rng(0)
    flat, noisy = np.full((16, 16, 3), 0.5, np.float32), generator.random((16, 16, 3), dtype=np.float32)
    scores = JpegCompressibility(quality=80).score([flat, noisy], ["", ""], [{}, {}])
    buffer = io.BytesIO()
    Image.fromarray(np.round(noisy * 255).astype(np.uint8)).save(buffer, "JPEG", quality=80)
    assert scores[1] == -len(buffer.getvalue()) / 1000
    assert scores[0] > scores[1]


def test_scorers_satisfy_the_protocol(probability, judge):
    for scorer in (probability, judge, JpegCompressibility()):
        assert isinstance(scorer, Scorer)


def test_diversity_is_the_mean_distance_within_a_digit():
    dark, light = np.zeros((8, 8, 1), np.float32), np.ones((8, 8, 1), np.float32)
    half = np.full((8, 8, 1), 0.5, np.float32)
    # In [-1, 1] black and white differ by 2 in 64 pixels: 16; black and grey by 8.
    assert digit_diversity([dark, light], [3, 3]) == pytest.approx(16)
    assert digit_diversity([dark, light, dark, half, half], [3, 3, 5, 5, 5]) == pytest.approx(
        (16 + 16 / 3) / 2
    )
    assert digit_diversity([dark, dark, light], [1, 1, 2]) == 0
    with pytest.raises(ValueError, match="two images of one digit"):
        digit_diversity([dark, light], [1, 2])


def test_real_diversity_is_that_of_the_rendered_scans():
    scans = half_a()
    images = [render(scan, (8, 8)) for scan in scans.images]
    assert real_diversity() == pytest.approx(digit_diversity(images, scans.labels), abs=1e-9)
    members = scans.images[scans.labels == 4].astype(np.float64)
    pairs = [np.linalg.norm(2 * (a - b)) for a in members for b in members]
    # Pairs of a scan with itself are 0 and do not count.
    count = int((scans.labels == 4).sum())
    fours = [image for image, label in zip(images, scans.labels, strict=True) if label == 4]
    assert digit_diversity(fours, [4] * count) == pytest.approx(sum(pairs) / (count * (count - 1)), rel=1e-6)
