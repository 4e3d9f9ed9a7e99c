# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from unirl.trainer.batch import batch_warnings
from unirl.types import Part


@pytest.mark.parametrize(
    ("advantages", "weights", "said"),
    [
        ([1.0, -1.0], [1.0, 1.0], ""),
        ([1.0, 0.0], [1.0, 0.0], ""),
        ([0.0, 0.0], [1.0, 1.0], "a rollout taught nothing: all rewards"),
        ([1.0, 0.0], [0.0, 1.0], "a rollout taught nothing: all rewards"),
        ([1.0, -1.0], [0.0, 0.0], "no row of a rollout could train"),
    ],
)
def test_a_batch_that_teaches_nothing_is_a_warning(
    advantages: list[float], weights: list[float], said: str
) -> None:
    rows = Part(
        ids=("r0.p0/0", "r0.p0/1"),
        prompts=("a three",) * 2,
        metadata=({},) * 2,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor(weights, dtype=torch.float64),
    )
    assert [text[: len(said)] for text in batch_warnings(rows)] == [said] * bool(said)
