# SPDX-License-Identifier: Apache-2.0
"""Numbers about a whole set of images (how diverse they are), which no score of a single row can give."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence

from unirl.reward.digit_diversity import digit_diversity, real_diversity
from unirl.types import Part


def check_set_metrics(names: Sequence[str], key: str = "eval.set_metrics") -> None:
    """Raises `ValueError` for an unknown name, with the nearest one."""
    for name in names:
        if name not in SET_METRICS:
            close = difflib.get_close_matches(name, SET_METRICS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{key} names {name!r}; allowed: {', '.join(SET_METRICS)}{hint}")


def set_metrics(names: Sequence[str], rows: Part) -> dict[str, float]:
    """All numbers of the named metrics for rows with `media`."""
    numbers: dict[str, float] = {}
    for name in names:
        numbers.update(SET_METRICS[name](rows))
    return numbers


def _diversity(rows: Part) -> dict[str, float]:
    """Mean pairwise distance within a digit, and as a share of the real scans'."""
    found = digit_diversity(rows.media or (), [m["digit"] for m in rows.metadata])
    return {"diversity": found, "diversity_of_real": found / real_diversity()}


SET_METRICS: Mapping[str, Callable[[Part], dict[str, float]]] = {"digit_diversity": _diversity}
"""What `eval.set_metrics` may name."""
