# SPDX-License-Identifier: Apache-2.0
"""Every rank derives the same units; a plan for what is left runs just that."""

from __future__ import annotations

import pickle

from rollouts import groups_of

from unirl.schedule.cost import CostModel, TokenCount
from unirl.schedule.plan import RolloutPlan


def plan(schedule: str = "steal", cost: CostModel | TokenCount | None = None) -> RolloutPlan:
    groups = tuple(groups_of([16, 4, 4, 9], [0, 0, 1, 1], [5, 6, 7, 4]))
    return RolloutPlan(groups, 2, schedule, cost or TokenCount(), max_rows=4)


def test_every_rank_derives_the_same_units() -> None:
    for cost in (TokenCount(), CostModel(a=1e-3, c=1e-2)):
        mine = plan(cost=cost)
        theirs = pickle.loads(pickle.dumps(mine))
        assert theirs.unit_table().digest == mine.unit_table().digest


def test_units_are_atoms_only_where_somebody_may_steal_and_a_call_has_a_known_cost() -> None:
    measured = CostModel(a=1e-3, c=1e-2)
    sizes = {
        (schedule, adaptive): {unit.num_rows for unit in plan(schedule, cost).unit_table().units}
        for schedule in ("owner", "ring", "steal")
        for adaptive, cost in ((False, TokenCount()), (True, measured))
    }
    assert sizes.pop(("steal", True)) == {1}
    assert all(max(rows) > 1 for rows in sizes.values())


def test_ranks_with_coordinators_of_their_own_run_every_unit_once() -> None:
    for schedule in ("owner", "ring"):
        p = plan(schedule)
        ran = []
        for rank in range(p.num_ranks):
            coordinator = p.coordinator()
            while (assignment := coordinator.pull(rank)) is not None:
                ran += p.unit_table().rows_of(assignment.unit_ids)
                coordinator.done(assignment.lease)
        assert sorted(ran) == sorted(p.unit_table().row_ids)


def test_a_plan_for_what_is_left_holds_those_rows_alone() -> None:
    left = ["g1/2", "g1/5", "g3/0"]
    rest = plan().restricted(left, num_ranks=1)
    assert rest.unit_table().row_ids == tuple(left)
    assert {group.owner for group in rest.groups} == {0}
    assert [group.workload.tokens for group in rest.groups] == [4, 9]
