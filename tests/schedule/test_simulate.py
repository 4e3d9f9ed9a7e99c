# SPDX-License-Identifier: Apache-2.0
"""Makespans, on the mix whose values are known and on random ones."""

from __future__ import annotations

import itertools
import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import PACKINGS, GivenCost, Packing, groups_of, policies, random_placement, tables

from unirl.schedule.coordinator import AdaptivePacking, Assignment, FullPacking
from unirl.schedule.cost import RankCorrection, TokenCount
from unirl.schedule.deques import CostDeques
from unirl.schedule.policies import OwnerPolicy, Pick, RingPolicy, StealPolicy
from unirl.schedule.simulate import EXAMPLE_MIX, Timeline, parse_mix, simulate
from unirl.schedule.units import UnitTable, build_unit_table

ROWS = 16


def example(policy: OwnerPolicy, *, unit_rows: int, packing: AdaptivePacking | None = None) -> Timeline:
    """The example mix, in units of the cost of a 512 x 512 group."""
    groups, num_ranks = parse_mix(EXAMPLE_MIX, rows_a_group=ROWS)
    atoms = {} if packing is None else {"min_rows": 1}
    table = build_unit_table(groups, TokenCount(), max_rows=unit_rows, **atoms)
    unit = ROWS * 1024
    timeline = simulate(table, num_ranks, policy, packing=packing)
    spans = tuple(span._replace(start=span.start / unit, end=span.end / unit) for span in timeline.spans)
    return Timeline(spans, num_ranks, timeline.ideal / unit, timeline.num_stolen_units)


def test_the_example_mix_has_an_ideal_of_6_28() -> None:
    timeline = example(OwnerPolicy(), unit_rows=ROWS)
    assert timeline.ideal == (23 * 1 + 5 * 2.25 + 4 * 4) / 8 == 6.28125


@pytest.mark.parametrize(
    ("policy", "unit_rows", "makespan"),
    [
        (OwnerPolicy(), ROWS, 10.0),
        (StealPolicy(), ROWS, 8.0),
        (StealPolicy(), ROWS // 2, 7.25),
        (StealPolicy(), ROWS // 4, 6.75),
    ],
    ids=["owner", "whole groups", "halves", "quarters"],
)
def test_the_example_mix_has_its_known_makespans(
    policy: OwnerPolicy, unit_rows: int, makespan: float
) -> None:
    assert example(policy, unit_rows=unit_rows).makespan == pytest.approx(makespan, abs=1e-12)


def test_adaptive_units_bring_the_example_mix_within_3_percent_of_the_ideal() -> None:
    timeline = example(StealPolicy(), unit_rows=ROWS, packing=AdaptivePacking(ROWS))
    assert timeline.tail_ratio <= 1.03
    # Not by running every row alone: far fewer calls than the 512 rows.
    assert len(timeline.spans) < 512 / 4


@pytest.mark.parametrize("placements", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_adaptive_units_are_within_3_percent_of_the_ideal_over_random_placements(placements: int) -> None:
    ratios = []
    for seed in range(placements):
        table = build_unit_table(random_placement(seed), TokenCount(), max_rows=ROWS, min_rows=1)
        ratios.append(simulate(table, 8, StealPolicy(), packing=AdaptivePacking(ROWS)).tail_ratio)
    assert min(ratios) >= 1.0 - 1e-12
    assert statistics.mean(ratios) <= 1.03


class BlindPacking(AdaptivePacking):
    """Shrinks calls with the work that is left, and takes a call to cost nothing."""

    def target_cost(self, unstarted_cost: float, num_ranks: int, per_call: float) -> float:
        return super().target_cost(unstarted_cost, num_ranks, 0.0)


@pytest.mark.parametrize("per_call", [1024.0, 8192.0])
def test_adaptive_units_weigh_the_cost_of_a_call_against_the_tail(per_call: float) -> None:
    """A call costs as much as the smallest row, or as eight: no fixed size is right, nor is guessing a size."""

    def mean_makespan(packing: AdaptivePacking | None, min_rows: int | None, max_rows: int) -> float:
        makespans = []
        for seed in range(40):
            table = build_unit_table(
                random_placement(seed), GivenCost(per_call), max_rows=max_rows, min_rows=min_rows
            )
            makespans.append(simulate(table, 8, StealPolicy(), packing=packing).makespan)
        return statistics.mean(makespans)

    adaptive = mean_makespan(AdaptivePacking(ROWS), 1, ROWS)
    assert adaptive < mean_makespan(BlindPacking(ROWS), 1, ROWS)
    for unit_rows in (1, 4, ROWS):
        assert adaptive < mean_makespan(None, None, unit_rows)


@settings(max_examples=300, deadline=None)
@given(tables(), policies, st.sampled_from(PACKINGS))
def test_a_timeline_runs_every_unit_once_and_no_rank_twice_at_a_time(
    drawn: tuple[UnitTable, int], policy: OwnerPolicy, packing: Packing
) -> None:
    table, num_ranks = drawn
    timeline = simulate(table, num_ranks, policy, packing=packing)
    ran = [unit_id for span in timeline.spans for unit_id in span.unit_ids]
    assert sorted(ran) == list(range(len(table.units)))
    for rank in range(num_ranks):
        spans = sorted(span for span in timeline.spans if span.rank == rank)
        assert all(first.end <= second.start for first, second in itertools.pairwise(spans))
    # Groups that share a call share what a call costs, so the work may come out below that of a call a group.
    if packing is None or not packing.across_groups:
        assert timeline.makespan >= timeline.ideal - 1e-9
    assert min(timeline.idle) >= -1e-9
    if packing is None:
        assert all(len(span.unit_ids) == 1 for span in timeline.spans)
        return
    for span in timeline.spans:
        units = [table.units[unit_id] for unit_id in span.unit_ids]
        assert sum(unit.num_rows for unit in units) <= 6 or len(units) == 1
        rows_of: dict[int, int] = {}
        for unit in units:
            rows_of[unit.group] = rows_of.get(unit.group, 0) + unit.num_rows
        assert packing.across_groups or len(rows_of) == 1
        # One batch: one shape, and equally many siblings of each group.
        assert len({table.shape(group) for group in rows_of}) == 1
        assert len(set(rows_of.values())) == 1


def test_full_packing_runs_as_many_groups_of_a_canvas_together_as_fit() -> None:
    groups = groups_of([9, 4, 4, 4, 9], [0] * 5, [4] * 5)
    table = build_unit_table(groups, TokenCount(), max_rows=8)
    timeline = simulate(table, 1, OwnerPolicy(), packing=FullPacking(8))
    assert [span.unit_ids for span in timeline.spans] == [(0, 4), (1, 2), (3,)]


def test_groups_in_one_call_pay_for_one_call() -> None:
    table = build_unit_table(groups_of([4, 4], [0, 0], [3, 3]), GivenCost(10.0), max_rows=6)
    assert table.cost_of((0, 1)) == 6 * 4 + 10.0
    assert table.cost_of((0,)) == 3 * 4 + 10.0


class AnyGreedyPolicy(OwnerPolicy):
    """An idle rank takes some unstarted unit, from either end of any queue."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, deques: CostDeques, rank: int) -> Pick | None:
        filled = [other for other in range(len(deques)) if deques.queue(other)]
        return Pick(self.rng.choice(filled), self.rng.random() < 0.5) if filled else None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 3), st.randoms())
def test_any_greedy_schedule_is_within_2_minus_1_over_m_of_the_optimum(
    costs: list[int], num_ranks: int, rng: random.Random
) -> None:
    """Against the best of all m^n assignments: stealing, and a rank that takes whatever there is."""
    owners = [rng.randrange(num_ranks) for _ in costs]
    table = build_unit_table(groups_of(costs, owners, [1] * len(costs)), TokenCount(), max_rows=1)
    optimum = min(
        max(sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(num_ranks))
        for ranks in itertools.product(range(num_ranks), repeat=len(costs))
    )
    for policy in (StealPolicy(), AnyGreedyPolicy(rng)):
        makespan = simulate(table, num_ranks, policy).makespan
        assert optimum <= makespan <= (2 - 1 / num_ranks) * optimum


def test_the_bound_of_greedy_schedules_is_reached() -> None:
    """m (m - 1) units of 1 and one of m on m ranks: the optimum is m, and the dearest last ends at 2 m - 1."""
    num_ranks = 4
    costs = [1] * num_ranks * (num_ranks - 1) + [num_ranks]
    owners = [index % num_ranks for index in range(len(costs))]
    table = build_unit_table(groups_of(costs, owners, [1] * len(costs)), TokenCount(), max_rows=1)

    class CheapestFirst(OwnerPolicy):
        def pick(self, deques: CostDeques, rank: int) -> Pick | None:
            filled = [other for other in range(len(deques)) if deques.queue(other)]
            cheapest = min(filled, key=lambda other: deques.queue(other)[-1].cost, default=None)
            return None if cheapest is None else Pick(cheapest, from_back=True)

    assert simulate(table, num_ranks, CheapestFirst()).makespan == 2 * num_ranks - 1
    assert simulate(table, num_ranks, StealPolicy()).makespan == num_ranks


def test_stealing_never_ends_after_owner_on_random_placements() -> None:
    for seed in range(300):
        table = build_unit_table(random_placement(seed), TokenCount(), max_rows=4)
        owner, steal = (simulate(table, 8, policy).makespan for policy in (OwnerPolicy(), StealPolicy()))
        assert steal <= owner


def test_ring_loads_of_3_groups_of_5_units_on_4_ranks_differ_by_one() -> None:
    groups = groups_of([1, 1, 1], [0, 1, 2], [5, 5, 5])
    table = build_unit_table(groups, TokenCount(), max_rows=1)
    loads = [len(units) for units in RingPolicy().place(table.units, 4)]
    assert loads == [4, 4, 4, 3]


def test_ring_is_exact_when_groups_have_a_multiple_of_the_ranks_in_units() -> None:
    groups, num_ranks = parse_mix(EXAMPLE_MIX, rows_a_group=ROWS)
    table = build_unit_table(groups, TokenCount(), max_rows=2)
    assert simulate(table, num_ranks, RingPolicy()).tail_ratio == 1.0


@pytest.mark.parametrize("mode", ["plain", "packed"])
def test_measured_speed_moves_work_away_from_a_slow_rank(mode: str) -> None:
    """Rank 0 takes three times as long as predicted; ranks that know it from the last rollout do better."""

    def makespan(correction: RankCorrection | None, rollouts: int) -> float:
        for seed in range(rollouts):
            atoms = {"min_rows": 1} if mode == "packed" else {}
            max_rows = ROWS if mode == "packed" else 4
            table = build_unit_table(random_placement(seed), TokenCount(), max_rows=max_rows, **atoms)
            packing = AdaptivePacking(ROWS) if mode == "packed" else None

            def duration(assignment: Assignment) -> float:
                return assignment.cost * (3.0 if assignment.rank == 0 else 1.0) / 1e6

            last = simulate(
                table, 8, StealPolicy(), packing=packing, correction=correction, duration=duration
            ).makespan
            total.append(last)
        return statistics.mean(total)

    total: list[float] = []
    uncorrected = makespan(None, 40)
    total = []
    corrected = makespan(RankCorrection(8), 40)
    assert corrected < uncorrected


def test_a_thousand_ranks_and_a_hundred_thousand_units_take_at_most_ten_seconds() -> None:
    rng = random.Random(0)
    tokens = [rng.choice([1024, 2304, 4096]) for _ in range(10_000)]
    groups = groups_of(tokens, [index // 10 for index in range(10_000)], [10] * 10_000)
    table = build_unit_table(groups, TokenCount(), max_rows=1)
    assert len(table.units) == 100_000
    started = time.process_time()
    timeline = simulate(table, 1000, StealPolicy())
    assert time.process_time() - started <= 10.0
    assert timeline.tail_ratio <= 1.03


def test_the_mix_is_read_as_written() -> None:
    groups, num_ranks = parse_mix("2*512,768x512; 1024", rows_a_group=3)
    assert num_ranks == 3
    assert [(group.owner, group.workload.tokens) for group in groups] == [
        (0, 1024),
        (0, 1536),
        (1, 1024),
        (1, 1536),
        (2, 4096),
    ]
    assert {len(group.row_ids) for group in groups} == {3}


@pytest.mark.parametrize("text", ["500", "512;", "2*", "x*512", "512x512x512", "-512"])
def test_a_mix_that_cannot_be_read_says_where(text: str) -> None:
    with pytest.raises(ValueError, match="of the mix"):
        parse_mix(text, rows_a_group=1)
