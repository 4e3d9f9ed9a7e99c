# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unirl.reward import JpegCompressibility, score_rows
from unirl.types import Part


class Brightness:
    """A scorer of a user: mean brightness; raises for an image that is all black."""

    name = "brightness"

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, images, prompts, metadata):
        self.calls.append(len(images))
        for image in images:
            if image.max() == 0:
                raise RuntimeError("nothing to see")
        return [float(image.mean()) for image in images]


def _part(values):
    return Part(
        ids=tuple(f"r0.p0/{j}" for j in range(len(values))),
        prompts=("a three",) * len(values),
        metadata=({},) * len(values),
        media=tuple(np.full((4, 4, 1), value, np.float32) for value in values),
    )


def test_scorer_that_raises_for_1_of_16_rows_loses_only_that_row(caplog):
    values = [0.5] * 16
    values[5] = 0.0
    scorer, failures = Brightness(), []
    scores = score_rows(
        {"brightness": scorer, "jpeg_compressibility": JpegCompressibility()}, _part(values), failures
    )
    expected = [math.nan if row == 5 else 0.5 for row in range(16)]
    assert scores["brightness"].dtype == torch.float64
    assert np.array_equal(scores["brightness"].numpy(), expected, equal_nan=True)
    assert torch.isfinite(scores["jpeg_compressibility"]).all()
    assert [(f.scorer, f.row_id, f.message) for f in failures] == [
        ("brightness", "r0.p0/5", "RuntimeError: nothing to see")
    ]
    assert scorer.calls == [16] + [1] * 16
    assert len(caplog.records) == 1 and "nothing to see" in caplog.text and "1 of 16" in caplog.text


def test_scorer_that_succeeds_is_called_once():
    scorer = Brightness()
    score_rows({"brightness": scorer}, _part([0.25, 0.75]))
    assert scorer.calls == [2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_missing_and_never_0(bad):
    class Odd:
        name = "odd"

        def score(self, images, prompts, metadata):
            return [1.0, bad, 2.0]

    failures = []
    scores = score_rows({"odd": Odd()}, _part([0.1, 0.2, 0.3]), failures)
    assert np.array_equal(scores["odd"].numpy(), [1.0, math.nan, 2.0], equal_nan=True)
    assert failures[0].row_id == "r0.p0/1" and str(bad) in failures[0].message


def test_a_scorer_that_returns_another_number_of_scores_fails_and_stops_no_other():
    class Doubled:
        name = "doubled"

        def score(self, images, prompts, metadata):
            return [1.0] * (2 * len(images))

    failures = []
    scores = score_rows(
        {"doubled": Doubled(), "brightness": Brightness()}, _part([0.25, 0.5, 0.75]), failures
    )
    assert scores["doubled"].isnan().all() and scores["brightness"].tolist() == [0.25, 0.5, 0.75]
    assert [f.row_id for f in failures] == ["r0.p0/0", "r0.p0/1", "r0.p0/2"]
    assert "returned 2 scores for 1 images; allowed: one an image" in failures[0].message


def test_a_scorer_that_skips_a_row_loses_that_row_and_mistakes_none_for_another():
    class Skipping:
        name = "skipping"

        def score(self, images, prompts, metadata):
            return [float(image.mean()) for image in images if image.max() > 0]

    scores = score_rows({"skipping": Skipping()}, _part([0.25, 0.0, 0.75]))
    assert np.array_equal(scores["skipping"].numpy(), [0.25, math.nan, 0.75], equal_nan=True)


def test_rows_without_media_are_an_error():
    with pytest.raises(ValueError, match="no media"):
        score_rows({}, _part([0.1]).replace(media=None))


def test_a_scorer_that_changes_its_images_and_metadata_changes_them_for_itself_alone():
    class Careless:
        name = "careless"

        def score(self, images, prompts, metadata):
            for image, mapping in zip(images, metadata, strict=True):
                image[:] = 0
                mapping["digits"].clear()
            return [0.0] * len(images)

    class Digits:
        name = "digits"

        def score(self, images, prompts, metadata):
            return [mapping["digits"][0] for mapping in metadata]

    part = _part([0.25, 0.75]).replace(metadata=({"digits": [3]}, {"digits": [4]}))
    scores = score_rows({"careless": Careless(), "brightness": Brightness(), "digits": Digits()}, part)
    assert scores["brightness"].tolist() == [0.25, 0.75] and scores["digits"].tolist() == [3, 4]
    assert [float(image.mean()) for image in part.media] == [0.25, 0.75]
