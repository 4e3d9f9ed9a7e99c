# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.schedule.shards import balanced_shards, micro_batches_of_one_canvas


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.data())
def test_shards_are_within_4_thirds_of_the_best(num_ranks: int, data: st.DataObject) -> None:
    """Graham's bound for longest-first, (4/3 - 1/(3m)), against the best of all assignments."""
    costs = data.draw(st.lists(st.integers(1, 30), min_size=num_ranks, max_size=8))
    shards = balanced_shards(costs, num_ranks)
    assert sorted(row for shard in shards for row in shard) == list(range(len(costs)))
    assert all(shard == sorted(shard) and shard for shard in shards)
    optimum = min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(num_ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(costs))
    )
    slowest = max(sum(costs[row] for row in shard) for shard in shards)
    assert slowest <= (4 / 3 - 1 / (3 * num_ranks)) * optimum + 1e-9


def test_the_mixs_training_tail_goes_from_10_to_below_6_5() -> None:
    """8 ranks x 4 groups of 4 rows; contiguous shards end at 10 group units, balanced ones near the ideal 6.28."""
    groups = [4, 4, 1, 1] + [4, 1, 1, 1] * 2 + [2.25, 1, 1, 1] * 5
    rows = [cost / 4 for cost in groups for _ in range(4)]
    contiguous = max(sum(rows[start : start + 16]) for start in range(0, 128, 16))
    balanced = max(sum(rows[row] for row in shard) for shard in balanced_shards(rows, 8))
    assert contiguous == 10.0
    assert balanced < 6.5


def test_rows_of_no_cost_are_spread_so_that_no_rank_is_empty() -> None:
    assert [len(shard) for shard in balanced_shards([0.0] * 4, 2)] == [2, 2]
    assert all(balanced_shards([5.0, 0.0, 0.0], 3))


def test_fewer_rows_than_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 rows cannot be split over 4 training ranks"):
        balanced_shards([1.0] * 3, 4)


def test_a_micro_batch_holds_one_canvas() -> None:
    small, large = (512, 512), (1024, 1024)
    assert micro_batches_of_one_canvas([small, large, small, small, large], 2) == [[0, 2], [3], [1, 4]]
    with pytest.raises(ValueError, match="micro batch size is 0"):
        micro_batches_of_one_canvas([small], 0)
