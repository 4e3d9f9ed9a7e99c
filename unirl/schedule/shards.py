# SPDX-License-Identifier: Apache-2.0
"""The training tail: shards of near-equal cost, and micro-batches of one canvas."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


def balanced_shards(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Row indices of each rank, in order: the dearest row first, each to the rank with the least cost so far.

    At most (4/3 - 1/(3m)) times the best possible largest shard (Graham, 1969). Every rank gets a row; fewer
    rows than ranks is an error, because a rank without rows could not take part in a step.
    """
    if len(costs) < num_ranks:
        raise ValueError(
            f"{len(costs)} rows cannot be split over {num_ranks} training ranks; raise batch_size or "
            "samples_per_prompt, or train on fewer devices"
        )
    shards: list[list[int]] = [[] for _ in range(num_ranks)]
    # Row counts break ties, so rows of no cost are spread as well and no rank stays empty.
    heap = [(0.0, 0, rank) for rank in range(num_ranks)]
    for row in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, count, rank = heapq.heappop(heap)
        shards[rank].append(row)
        heapq.heappush(heap, (load + costs[row], count + 1, rank))
    return [sorted(shard) for shard in shards]


def micro_batches_of_one_canvas(canvases: Sequence[Hashable], size: int) -> list[list[int]]:
    """Row indices of each micro-batch: at most `size` rows of one canvas; canvases in order of appearance."""
    if size < 1:
        raise ValueError(f"the micro batch size is {size}; it must be at least 1")
    rows_of: dict[Hashable, list[int]] = {}
    for row, canvas in enumerate(canvases):
        rows_of.setdefault(canvas, []).append(row)
    return [rows[start : start + size] for rows in rows_of.values() for start in range(0, len(rows), size)]
