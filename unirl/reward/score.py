# SPDX-License-Identifier: Apache-2.0
"""Runs scorers on generated rows. A row that cannot be scored gets NaN, and costs its neighbours nothing."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch

from unirl.protocols import Scorer
from unirl.types import Part

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ScoringFailure:
    """A row that a scorer could not score, and why."""

    scorer: str
    row_id: str
    message: str


def score_rows(
    scorers: Mapping[str, Scorer], part: Part, failures: list[ScoringFailure] | None = None
) -> dict[str, torch.Tensor]:
    """Scores every row with every scorer.

    A scorer that raises for the batch, or returns another number of scores than it got images, is asked again
    row by row, so that only the rows it really fails on are lost. The first failure of a call is logged with its text.

    Args:
        scorers: by name.
        part: N rows with `media`.
        failures: what could not be scored is appended here.

    Returns: name to float64 `[N]`; NaN where the scorer raised or returned no finite number.

    Raises:
        ValueError: rows without media.
    """
    if part.media is None:
        raise ValueError("score_rows: the rows have no media; generate with decode before scoring")
    result: dict[str, torch.Tensor] = {}
    for name, scorer in scorers.items():
        failed: list[ScoringFailure] = []
        result[name] = torch.tensor(_score(name, scorer, part, failed), dtype=torch.float64)
        if failed:
            _logger.warning(
                "scorer %s failed on %d of %d rows; first, row %s: %s",
                name,
                len(failed),
                len(part),
                failed[0].row_id,
                failed[0].message,
            )
            if failures is not None:
                failures.extend(failed)
    return result


def _score(name: str, scorer: Scorer, part: Part, failed: list[ScoringFailure]) -> list[float]:
    try:
        values = _call(scorer, part)
    # A scorer is foreign code: whatever it raises, the other rows still have to be scored.
    except Exception as error:
        if len(part) == 1:
            failed.append(ScoringFailure(name, part.ids[0], f"{type(error).__name__}: {error}"))
            return [float("nan")]
        return [_score(name, scorer, part.select([row]), failed)[0] for row in range(len(part))]
    for row, value in enumerate(values):
        if value - value != 0:
            failed.append(ScoringFailure(name, part.ids[row], f"returned {value}"))
            values[row] = float("nan")
    return values


def _call(scorer: Scorer, part: Part) -> list[float]:
    # Copies: what a scorer does to its images and metadata is seen by no other one, nor in the samples.
    images = [image.copy() for image in part.media or ()]
    scores: Sequence[float] = scorer.score(images, part.prompts, copy.deepcopy(part.metadata))
    values = [float(value) for value in scores]
    if len(values) != len(part):
        raise ValueError(f"returned {len(values)} scores for {len(part)} images; allowed: one an image")
    return values
