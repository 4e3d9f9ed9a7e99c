# SPDX-License-Identifier: Apache-2.0
"""Scorers, and how their scores become one reward a row."""

from unirl.reward.compose import Combined, RewardError, combine, component_means
from unirl.reward.digit_diversity import digit_diversity, real_diversity
from unirl.reward.digit_judge import DigitJudge
from unirl.reward.digit_probability import DigitProbability
from unirl.reward.jpeg_compressibility import JpegCompressibility
from unirl.reward.registry import BUILT_IN, build_scorers, check_scorers
from unirl.reward.score import ScoringFailure, score_rows

__all__ = [
    "BUILT_IN",
    "Combined",
    "DigitJudge",
    "DigitProbability",
    "JpegCompressibility",
    "RewardError",
    "ScoringFailure",
    "build_scorers",
    "check_scorers",
    "combine",
    "component_means",
    "digit_diversity",
    "real_diversity",
    "score_rows",
]
