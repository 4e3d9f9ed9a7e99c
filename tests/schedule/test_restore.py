# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.schedule.restore import restore_order


@given(st.permutations([f"r3.p{prompt}/{sibling}" for prompt in range(3) for sibling in range(4)]))
def test_rows_return_to_their_owners_positions_from_any_order(returned: list[str]) -> None:
    expected = [f"r3.p{prompt}/{sibling}" for prompt in range(3) for sibling in range(4)]
    order = restore_order(expected, returned)
    assert [returned[index] for index in order] == expected


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (["a", "b"], "missing: c"),
        (["a", "b", "c", "c"], "returned more than once: c"),
        (["a", "b", "x"], "missing: c; never asked for: x"),
        (["a", "a", "b"], "missing: c; returned more than once: a"),
        (["a", "b", "c", "d"], "never asked for: d"),
        ([], "3 rows were asked for and 0 came back; missing: a, b, c"),
    ],
)
def test_rows_that_do_not_match_are_refused_by_id(returned: list[str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        restore_order(["a", "b", "c"], returned)


def test_a_row_asked_for_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="asked for twice: a"):
        restore_order(["a", "a"], ["a", "a"])


def test_a_long_list_of_missing_rows_is_cut() -> None:
    with pytest.raises(ValueError, match="p0, p1, p2, p3, p4 and 3 more"):
        restore_order([f"p{index}" for index in range(8)], [])
