# SPDX-License-Identifier: Apache-2.0
"""Every unit exactly once, whatever the ranks do."""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import PACKINGS, Packing, groups_of, policies, random_placement, tables

from unirl.schedule.coordinator import AdaptivePacking, Assignment, Coordinator
from unirl.schedule.cost import RankCorrection, TokenCount
from unirl.schedule.deques import CostDeques
from unirl.schedule.policies import POLICIES, OwnerPolicy, RingPolicy, StealPolicy, policy_for
from unirl.schedule.restore import restore_order
from unirl.schedule.units import Unit, UnitTable, build_unit_table


def cost_of_rows(table: UnitTable, unit_ids: Sequence[int]) -> float:
    groups = [table.units[unit_id].group for unit_id in unit_ids]
    rows = sum(
        len(table.rows_of([unit_id])) * table.per_row[group]
        for unit_id, group in zip(unit_ids, groups, strict=True)
    )
    return rows + max(table.per_call[group] for group in groups)


def assert_one_batch(table: UnitTable, unit_ids: Sequence[int]) -> None:
    """Groups of one shape, and of each a run of neighbours."""
    runs: dict[int, list[int]] = {}
    for unit_id in sorted(unit_ids):
        runs.setdefault(table.units[unit_id].group, []).append(unit_id)
    assert len({table.shape(group) for group in runs}) == 1
    assert all(run == list(range(run[0], run[-1] + 1)) for run in runs.values())


def run_to_the_end(
    coordinator: Coordinator, num_ranks: int, rng: random.Random, *, crash_rate: float = 0.0
) -> list[str]:
    """Ranks pull, finish, deliver, die and come back in random order; the ids of the rows that were delivered.

    A rank keeps finished rows until it delivers them. When it dies they are gone, and a report of a call that it was
    running may still arrive later.
    """
    table = coordinator.table
    running: dict[int, Assignment] = {}
    held: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    delivered: list[int] = []
    ghosts: list[Assignment] = []
    while not coordinator.is_finished or any(held.values()):
        rank = rng.randrange(num_ranks)
        if rng.random() < crash_rate:
            if rank in running:
                ghosts.append(running.pop(rank))
            lost = set(held[rank])
            held[rank] = []
            assert lost <= set(coordinator.lost(rank, delivered=set(delivered)))
        elif ghosts and rng.random() < 0.3:
            assert coordinator.done(ghosts.pop().lease) is False
        elif rank in running:
            assignment = running.pop(rank)
            assert coordinator.done(assignment.lease, seconds=rng.uniform(0.1, 2.0))
            held[rank].extend(assignment.unit_ids)
        elif (assignment := coordinator.pull(rank)) is not None:
            assert assignment.rank == rank
            assert_one_batch(table, assignment.unit_ids)
            assert assignment.cost == pytest.approx(cost_of_rows(table, assignment.unit_ids))
            running[rank] = assignment
        elif rng.random() < 0.5:
            delivered += held[rank]
            held[rank] = []
    return list(table.rows_of(delivered))


@settings(max_examples=300, deadline=None)
@given(
    tables(), policies, st.sampled_from(PACKINGS), st.sampled_from([0.0, 0.03, 0.1]), st.integers(0, 2**32)
)
def test_every_unit_is_done_exactly_once_under_any_interleaving_crash_and_restart(
    drawn: tuple[UnitTable, int], policy: OwnerPolicy, packing: Packing, crash_rate: float, seed: int
) -> None:
    table, num_ranks = drawn
    coordinator = Coordinator(table, num_ranks, policy, packing=packing)
    rows = run_to_the_end(coordinator, num_ranks, random.Random(seed), crash_rate=crash_rate)
    assert sorted(rows) == sorted(table.row_ids)
    assert coordinator.num_unstarted == 0
    assert all(coordinator.pull(rank) is None for rank in range(num_ranks))


@settings(max_examples=200, deadline=None)
@given(tables(), policies, st.sampled_from(PACKINGS), st.sampled_from([0.03, 0.2]), st.integers(0, 2**32))
def test_every_unit_is_done_exactly_once_when_ranks_die_unnoticed_and_start_over(
    drawn: tuple[UnitTable, int], policy: OwnerPolicy, packing: Packing, crash_rate: float, seed: int
) -> None:
    """Nobody reports a death: the successor's first pull does. Ranks return what they hold at the very end."""
    table, num_ranks = drawn
    coordinator, rng = Coordinator(table, num_ranks, policy, packing=packing), random.Random(seed)
    running: dict[int, Assignment] = {}
    held: dict[int, list[int]] = {}
    starting = set(range(num_ranks))
    while not coordinator.is_finished or starting:
        rank = rng.randrange(num_ranks)
        if rank not in starting and rng.random() < crash_rate:
            ghost = running.pop(rank, None)
            held[rank] = []
            if ghost is None or rng.random() < 0.5:
                starting.add(rank)
            else:  # a report of the dead arrives after its successor has started
                if (assignment := coordinator.start(rank)) is not None:
                    running[rank] = assignment
                assert not coordinator.done(ghost.lease)
        elif rank in running:
            assignment = running.pop(rank)
            assert coordinator.done(assignment.lease)
            held[rank].extend(assignment.unit_ids)
        else:
            assignment = coordinator.start(rank) if rank in starting else coordinator.pull(rank)
            held.setdefault(rank, [])
            starting.discard(rank)
            if assignment is not None:
                running[rank] = assignment
    assert not running
    assert sorted(unit_id for units in held.values() for unit_id in units) == list(range(len(table.units)))


@settings(max_examples=50, deadline=None)
@given(tables(), st.integers(0, 2**32))
def test_results_are_independent_of_the_policy(drawn: tuple[UnitTable, int], seed: int) -> None:
    """A row's result is a function of its id here; restored, every policy gives the owners the same table."""
    table, num_ranks = drawn
    results = set()
    for policy_class in POLICIES.values():
        for packing in PACKINGS:
            coordinator = Coordinator(table, num_ranks, policy_class(), packing=packing)
            rows = run_to_the_end(coordinator, num_ranks, random.Random(seed))
            values = [f"image of {row_id}" for row_id in rows]
            results.add(tuple(values[index] for index in restore_order(table.row_ids, rows)))
    assert results == {tuple(f"image of {row_id}" for row_id in table.row_ids)}


def test_a_dead_ranks_work_is_finished_by_the_others_under_every_policy() -> None:
    for policy_class in POLICIES.values():
        table = build_unit_table(random_placement(0), TokenCount(), max_rows=8)
        coordinator = Coordinator(table, 8, policy_class())
        running = coordinator.pull(3)
        assert running is not None
        again = coordinator.lost(3)
        assert set(running.unit_ids) <= set(again)
        assert not coordinator.done(running.lease)
        while (assignment := coordinator.pull(0)) is not None:
            assert coordinator.done(assignment.lease)
        owned_by_others = coordinator.num_unstarted
        for rank in (1, 2, 4, 5, 6, 7):
            while (assignment := coordinator.pull(rank)) is not None:
                assert coordinator.done(assignment.lease)
        assert coordinator.is_finished
        assert (owned_by_others == 0) == (policy_class is StealPolicy)


def test_rows_that_a_dead_rank_had_delivered_are_not_done_again() -> None:
    table = build_unit_table(groups_of([1], [0], [4]), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 2, OwnerPolicy())
    for _ in range(3):
        assignment = coordinator.pull(0)
        assert assignment is not None and coordinator.done(assignment.lease)
    assert coordinator.lost(0, delivered={0, 1}) == (2, 3)
    assert coordinator.lost(0) == ()


def test_a_call_is_larger_where_fewer_ranks_are_left() -> None:
    """max(R / (1.25 m), 0) with R = 40 rows of cost 1: 8 rows on 4 ranks, 32 on the last one."""
    sizes = []
    for deaths in (0, 3):
        table = build_unit_table(groups_of([1], [0], [40]), TokenCount(), max_rows=40, min_rows=1)
        coordinator = Coordinator(table, 4, StealPolicy(), packing=AdaptivePacking(40))
        for rank in range(1, 1 + deaths):
            coordinator.lost(rank)
        assignment = coordinator.pull(0)
        assert assignment is not None
        sizes.append(len(assignment.unit_ids))
    assert sizes == [8, 32]


def test_owner_runs_its_own_dearest_first_and_steals_nothing() -> None:
    table = build_unit_table(groups_of([1, 4, 9, 2], [0, 0, 0, 1], [1] * 4), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 2, OwnerPolicy())
    pulled = [coordinator.pull(0) for _ in range(4)]
    assert [assignment and assignment.unit_ids for assignment in pulled] == [(2,), (1,), (0,), None]
    assert coordinator.num_stolen_units == 0


def test_a_thief_takes_the_cheapest_unit_of_the_rank_with_most_queued_cost() -> None:
    tokens, owners = [9, 4, 2, 8, 8], [0, 0, 0, 1, 1]
    table = build_unit_table(groups_of(tokens, owners, [1] * 5), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 3, StealPolicy())
    first, second = coordinator.pull(2), coordinator.pull(2)
    # Rank 1 holds 16 and rank 0 holds 15; afterwards rank 0 holds more.
    assert first is not None and first.unit_ids == (4,) and first.stolen
    assert second is not None and second.unit_ids == (2,)
    assert coordinator.num_stolen_units == 2


def test_a_thief_knows_from_the_last_rollout_which_rank_is_slow() -> None:
    """Equal queues, but rank 1 takes twice the time: the first thief already goes there."""
    table = build_unit_table(groups_of([4] * 4, [0, 0, 1, 1], [1] * 4), TokenCount(), max_rows=1)
    correction = RankCorrection(3)
    for rank, seconds in enumerate((1.0, 2.0, 1.0)):
        correction.update(rank, predicted=1.0, measured=seconds)
    stolen = Coordinator(table, 3, StealPolicy(), correction=correction).pull(2)
    assert stolen is not None and table.units[stolen.unit_ids[0]].owner == 1


def test_one_round_trip_reports_and_pulls() -> None:
    table = build_unit_table(groups_of([1], [0], [2]), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 1, OwnerPolicy())
    first = coordinator.pull(0)
    assert first is not None
    accepted, second = coordinator.done_and_pull(0, first.lease, 0.1)
    assert accepted and second is not None
    assert coordinator.done_and_pull(0, second.lease, 0.1) == (True, None)
    assert coordinator.done_and_pull(0, second.lease, 0.1) == (False, None)
    assert coordinator.is_finished


def test_a_rank_that_starts_over_gives_back_what_it_had_pulled() -> None:
    """Nobody said that it died: its second first pull does."""
    table = build_unit_table(groups_of([1, 1], [0, 1], [3, 1]), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 2, StealPolicy())
    first = coordinator.start(0)
    assert first is not None and coordinator.done(first.lease)
    running = coordinator.pull(0)
    assert running is not None
    ran = []
    assignment = coordinator.start(0)
    assert coordinator.done(running.lease) is False
    while assignment is not None:
        ran += assignment.unit_ids
        assignment = coordinator.done_and_pull(0, assignment.lease, None)[1]
    assert sorted(ran) == [0, 1, 2, 3]
    assert coordinator.is_finished


def test_the_first_start_of_a_rank_takes_nothing_back() -> None:
    table = build_unit_table(groups_of([1], [0], [2]), TokenCount(), max_rows=1)
    coordinator = Coordinator(table, 2, StealPolicy())
    mine = coordinator.start(0)
    theirs = coordinator.start(1)
    assert mine is not None and theirs is not None and theirs.stolen
    assert coordinator.done(mine.lease) and coordinator.done(theirs.lease)


def test_a_group_of_a_rank_that_does_not_exist_is_refused() -> None:
    table = build_unit_table(groups_of([1], [3], [1]), TokenCount(), max_rows=1)
    with pytest.raises(ValueError, match=r"ranks \[3\], and there are 2"):
        Coordinator(table, 2, OwnerPolicy())


def bookkeeping_rate(turns: int = 48_000) -> float:
    """Turns a second, of processor time, of what a pull is made of: a named tuple, a heap, a deque and a dictionary."""
    heap, queue, leases = [(-rank, rank) for rank in range(64)], deque(range(64)), {}
    started = time.process_time()
    for turn in range(turns):
        leases[turn] = Unit(turn, 0, turn, turn + 1, 0, 1.0)
        heapq.heapreplace(heap, (-(turn * 7919 % 1000), turn))
        queue.append(queue.popleft())
        del leases[turn]
    return turns / (time.process_time() - started)


@pytest.mark.parametrize("num_ranks", [8, 64, 1000])
def test_the_coordinator_serves_200_000_pulls_a_second(num_ranks: int) -> None:
    """A pull and its report, with three units in four stolen, on a machine of 1.1 million turns of `bookkeeping_rate`.

    On a slower or a busy machine as many fewer; best of five, each beside a measurement of the machine.
    """
    groups = groups_of([4] * 1500, [index % (num_ranks // 4) for index in range(1500)], [16] * 1500)
    table = build_unit_table(groups, TokenCount(), max_rows=1)
    best = 0.0
    for _ in range(5):
        coordinator = Coordinator(table, num_ranks, StealPolicy())
        started = time.process_time()
        num_pulls = 0
        while (assignment := coordinator.pull(num_pulls % num_ranks)) is not None:
            coordinator.done(assignment.lease)
            num_pulls += 1
        best = max(best, num_pulls / (time.process_time() - started) * 1.1e6 / bookkeeping_rate())
    assert num_pulls == 24_000
    assert coordinator.num_stolen_units >= 0.7 * num_pulls
    assert best >= 200_000


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5),
    st.lists(st.tuples(st.sampled_from(["front", "back", "factor"]), st.integers(0, 4)), max_size=40),
)
def test_the_most_loaded_rank_is_found_after_any_changes(
    costs: list[list[int]], changes: list[tuple[str, int]]
) -> None:
    """Against a plain maximum over all ranks."""
    flat = [(cost, rank) for rank, rank_costs in enumerate(costs) for cost in rank_costs]
    groups = groups_of([cost for cost, _ in flat], [rank for _, rank in flat], [1] * len(flat))
    table = build_unit_table(groups, TokenCount(), max_rows=1)
    deques = CostDeques(OwnerPolicy().place(table.units, len(costs)))
    factors = [1.0] * len(costs)
    for step, (change, rank) in enumerate(changes):
        rank %= len(costs)
        if change == "factor":
            factors[rank] = 0.5 + (step * 7 % 5) / 2
            deques.set_factor(rank, factors[rank])
        elif deques.queue(rank):
            (deques.pop_front if change == "front" else deques.pop_back)(rank)
        loads = [
            sum(unit.cost for unit in deques.queue(other)) * factors[other] if deques.queue(other) else -1.0
            for other in range(len(costs))
        ]
        expected = loads.index(max(loads)) if max(loads) >= 0 else None
        assert deques.most_loaded() == expected


def test_steal_is_refused_for_an_engine_whose_noise_is_not_keyed_by_row() -> None:
    with pytest.raises(ValueError, match=r"schedule is 'steal'.*'trainside'"):
        policy_for("steal", engine="trainside", noise_keyed_by_row=False)
    assert policy_for("steal", engine="trainside", noise_keyed_by_row=True).name == "steal"
    assert isinstance(policy_for("ring", engine="trainside", noise_keyed_by_row=False), RingPolicy)


def test_an_unknown_schedule_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="'fifo'; allowed are owner, ring, steal"):
        policy_for("fifo", engine="trainside", noise_keyed_by_row=True)
