# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from unirl.metrics import Aggregate


def test_two_updates_of_unequal_rows_are_both_shown_with_the_mean_and_the_maximum() -> None:
    aggregate = Aggregate()
    aggregate.mean({"clip": 0.0}, 3, update=0)
    aggregate.mean({"clip": 0.4}, 1, update=1)
    assert aggregate.result() == pytest.approx(
        {"clip": 0.1, "clip_max": 0.4, "clip/update_0": 0.0, "clip/update_1": 0.4}
    )


def test_ranks_that_are_merged_equal_one_rank_that_saw_everything() -> None:
    whole, left, right = Aggregate(), Aggregate(), Aggregate()
    for index, (value, rows) in enumerate([(0.5, 2), (-3.0, 1), (0.25, 8), (7.0, 5)]):
        for aggregate in (whole, left if index % 2 else right):
            aggregate.mean({"gn": value}, rows)
            aggregate.maximum({"parity/abs_dlogp_max": abs(value)})
            aggregate.total({"rows/dropped": index})
    assert left.merge([right.state()]).result() == pytest.approx(whole.result())
    assert whole.result() == pytest.approx(
        {"gn": (1 - 3 + 2 + 35) / 16, "gn_max": 7.0, "parity/abs_dlogp_max": 7.0, "rows/dropped": 6}
    )


def test_padding_of_no_rows_counts_nowhere_even_when_it_is_not_a_number() -> None:
    aggregate = Aggregate()
    aggregate.mean({"reward": math.nan}, 0)
    aggregate.mean({"reward": -2.0}, 4)
    assert aggregate.result() == {"reward": -2.0, "reward_max": -2.0}


def test_a_mean_without_rows_is_nan_and_not_zero() -> None:
    aggregate = Aggregate()
    aggregate.mean({"reward": 0.0}, 0)
    assert math.isnan(aggregate.result()["reward"])


def test_a_nan_of_live_rows_is_not_hidden() -> None:
    aggregate = Aggregate()
    aggregate.mean({"gn": math.nan}, 1)
    aggregate.mean({"gn": 1.0}, 1)
    assert math.isnan(aggregate.result()["gn"])


def test_negative_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="rows is -1"):
        Aggregate().mean({"gn": 1.0}, -1)
