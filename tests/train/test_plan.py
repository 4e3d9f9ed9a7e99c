# SPDX-License-Identifier: Apache-2.0
"""The plan of a training step: disjoint updates by group, balanced ranks, equal numbers of micros."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.train.plan import plan_updates


def _rows(num_groups: int, siblings: int) -> list[str]:
    return [f"p{g}" for g in range(num_groups) for _ in range(siblings)]


def test_ranks_with_five_and_one_micros_get_equal_numbers():
    # One row of cost 5 balances five rows of cost 1: 5 micros on one rank, 1 on the other.
    plan = plan_updates(["a"] * 6, [16, 8, 8, 8, 8, 8], [5, 1, 1, 1, 1, 1], 2, 1, 1)
    real = [[m for m in micros if m] for micros in plan.micros[0]]
    assert sorted(len(m) for m in real) == [1, 5]
    assert [len(micros) for micros in plan.micros[0]] == [5, 5]
    assert plan.weight_sums == (6.0,)


def test_fewer_rows_than_ranks_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"fewer rows than ranks.*batch_size"):
        plan_updates(["a", "a", "b"], [8] * 3, [1.0] * 3, 4, 1, 8)
    with pytest.raises(ValueError, match="fewer rows than ranks"):
        plan_updates(_rows(2, 2), [8] * 4, [1.0] * 4, 3, 2, 8)


def test_fewer_groups_than_updates_names_both_keys():
    with pytest.raises(ValueError, match=r"num_updates_per_batch is 3.*2 groups.*batch_size"):
        plan_updates(_rows(2, 4), [8] * 8, [1.0] * 8, 1, 3, 8)


def test_updates_hold_whole_groups_in_order():
    plan = plan_updates(_rows(5, 3), [8] * 15, [1.0] * 15, 1, 2, 4)
    first, second = (sorted(r for m in update[0] for r in m) for update in plan.micros)
    assert first == list(range(9)) and second == list(range(9, 15))


def test_siblings_stay_together_where_costs_are_equal():
    plan = plan_updates(_rows(4, 4), [8] * 16, [1.0] * 16, 2, 1, 4)
    assert plan.micros[0] == (((0, 1, 2, 3), (4, 5, 6, 7)), ((8, 9, 10, 11), (12, 13, 14, 15)))


def test_micros_of_one_canvas_are_equal_to_within_one_row():
    plan = plan_updates(["a"] * 17, [8] * 17, [1.0] * 17, 1, 1, 8)
    assert [len(m) for m in plan.micros[0][0]] == [6, 6, 5]


def test_rows_of_weight_zero_are_nowhere():
    weights = [1, 0, 1, 1, 0, 0, 2, 1]
    plan = plan_updates(_rows(4, 2), [8] * 8, [1.0] * 8, 2, 2, 8, weights=weights)
    used = [r for update in plan.micros for micros in update for m in micros for r in m]
    assert sorted(used) == [0, 2, 3, 6, 7]
    assert sum(plan.weight_sums) == 6.0
    # Group 2 has no live row, so the three live ones are split 2 + 1.
    assert plan.weight_sums == (3.0, 3.0)


def test_rank_view_points_at_the_same_rows():
    plan = plan_updates(_rows(4, 3), [8, 16, 8] * 4, [1.0, 4.0, 1.0] * 4, 2, 2, 2)
    for rank in range(2):
        view = plan.for_rank(rank)
        back = tuple(tuple(tuple(view.rows[i] for i in m) for m in u.micros) for u in view.updates)
        assert back == tuple(update[rank] for update in plan.micros)
    with pytest.raises(ValueError, match="rank 2"):
        plan.for_rank(2)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    world_size=st.integers(1, 4),
    num_updates=st.integers(1, 3),
    micro=st.integers(1, 5),
    data=st.data(),
)
def test_every_live_row_is_trained_once_and_costs_are_balanced(sizes, world_size, num_updates, micro, data):
    groups = [f"g{i}" for i, n in enumerate(sizes) for _ in range(n)]
    canvases = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=len(groups), max_size=len(groups)))
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=len(groups), max_size=len(groups))
    )
    costs = [float(c) for c in canvases]
    if len(sizes) < num_updates or len(groups) < world_size * num_updates:
        with pytest.raises(ValueError):
            plan_updates(groups, canvases, costs, world_size, num_updates, micro, weights=weights)
        return
    plan = plan_updates(groups, canvases, costs, world_size, num_updates, micro, weights=weights)
    used = [r for update in plan.micros for micros in update for m in micros for r in m]
    assert sorted(used) == [i for i, w in enumerate(weights) if w > 0]
    owner: dict[str, int] = {}
    for u, update in enumerate(plan.micros):
        assert len({len(micros) for micros in update}) == 1
        loads = [sum(costs[r] for m in micros for r in m) for micros in update]
        assert max(loads) - min(loads) <= max(costs)
        for micros in update:
            for m in micros:
                assert len(m) <= micro and len({canvases[r] for r in m}) <= 1
                assert all(owner.setdefault(groups[r], u) == u for r in m)
    again = plan_updates(groups, canvases, costs, world_size, num_updates, micro, weights=weights)
    assert again == plan
