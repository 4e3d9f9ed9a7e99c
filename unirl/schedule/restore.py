# SPDX-License-Identifier: Apache-2.0
"""Puts rows that came back from anywhere into the order in which they were asked for, and verifies them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def restore_order(expected: Sequence[str], returned: Sequence[str]) -> list[int]:
    """Indices into `returned` such that `[returned[i] for i in result] == list(expected)`.

    Rows are known by id, never by position. Raises ValueError when a row is missing, came back twice, or was
    not asked for: a schedule that lost or repeated work must not reach the advantages.
    """
    position = {row_id: index for index, row_id in enumerate(returned)}
    if len(position) == len(returned) == len(expected) and all(row_id in position for row_id in expected):
        return [position[row_id] for row_id in expected]
    wanted = Counter(expected)
    repeated_ids = [row_id for row_id, count in wanted.items() if count > 1]
    if repeated_ids:
        raise ValueError(f"rows were asked for twice: {_some(repeated_ids)}")
    counts = Counter(returned)
    problems = {
        "missing": [row_id for row_id in expected if row_id not in counts],
        "returned more than once": [row_id for row_id, count in counts.items() if count > 1],
        "never asked for": [row_id for row_id in counts if row_id not in wanted],
    }
    listed = "; ".join(f"{what}: {_some(ids)}" for what, ids in problems.items() if ids)
    raise ValueError(f"{len(expected)} rows were asked for and {len(returned)} came back; {listed}")


def _some(ids: Iterable[str], limit: int = 5) -> str:
    listed = sorted(ids)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
