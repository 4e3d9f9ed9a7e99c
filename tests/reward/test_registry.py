# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from unirl.config import ScorerConfig
from unirl.reward import DigitProbability, build_scorers, check_scorers, digit_probability


def test_scorers_come_under_the_names_the_recipe_gives_them():
    configs = (
        ScorerConfig(name="jpeg_compressibility", options={"quality": 50}),
        ScorerConfig(name="unirl.reward.digit_probability:DigitProbability"),
    )
    scorers = build_scorers(configs)
    assert list(scorers) == [c.name for c in configs]
    assert scorers["jpeg_compressibility"].quality == 50
    assert isinstance(scorers[configs[1].name], DigitProbability)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"name": "digit_probabilty"},
            r"scorers\[0\].name is 'digit_probabilty'; allowed: .*did you mean 'digit_probability'",
        ),
        (
            {"name": "no.such.module:Thing"},
            r"scorers\[0\].name is 'no.such.module:Thing', which cannot be imported .*a folder of PYTHONPATH",
        ),
        ({"name": "unirl.digits:render"}, r"has no method score; allowed: a class with score\(images"),
        (
            {"name": "jpeg_compressibility", "options": {"qualty": 3}},
            "no option 'qualty'; allowed: quality; did you mean 'quality'",
        ),
        (
            {"name": "jpeg_compressibility", "options": {"quality": 99}},
            "quality is 99; allowed: an integer from 1 to 95",
        ),
        ({"name": "digit_judge", "options": {"x": 1}}, "no option 'x'; allowed: none"),
    ],
)
def test_a_scorer_that_cannot_work_is_an_error_before_it_is_made(config, message):
    with pytest.raises(ValueError, match=message):
        check_scorers([ScorerConfig(**config)])


def test_a_scorer_named_twice_is_an_error():
    with pytest.raises(ValueError, match=r"scorers\[1\].name is 'digit_judge' again"):
        check_scorers([ScorerConfig(name="digit_judge")] * 2)


def test_missing_reward_weights_name_the_path_and_the_setting_before_anything_is_loaded(
    tmp_path, monkeypatch
):
    path = str(tmp_path / "gone.safetensors")
    config = ScorerConfig(name="digit_probability", options={"weights": path})
    with pytest.raises(
        ValueError, match=r"no weights at .*gone.safetensors; set reward.scorers\[\].options.weights"
    ):
        check_scorers([config])
    monkeypatch.setattr(digit_probability, "WEIGHTS", tmp_path / "shipped.safetensors")
    with pytest.raises(ValueError, match=r"no weights at .*shipped.safetensors"):
        check_scorers([ScorerConfig(name="digit_probability")])
