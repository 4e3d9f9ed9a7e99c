# SPDX-License-Identifier: Apache-2.0
"""The invariants of the async rollout scheduler, over random interleavings in simulated time."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_slab import Group, Prompts, Run, SimulatedSlab, prompt_stream, retried, train

from unirl.rollout.async_runtime import AsyncRolloutScheduler, drained_at_exit

interleavings = settings(max_examples=600, deadline=None)


@dataclass(frozen=True)
class Plan:
    """A configuration and a world: everything that a run depends on."""

    groups_per_step: int
    num_rollouts: int
    max_inflight: int
    weight_sync_interval: int
    buffer_max_staleness: int
    buffer_order: str
    reap_before_launch: bool
    deterministic: bool
    group_counts: tuple[int, ...]
    num_lanes: int
    failure_rate: float
    extra_pushes: float
    train_s: float
    seed: int

    def build(self, seed: int | None = None) -> tuple[AsyncRolloutScheduler, SimulatedSlab]:
        slab = SimulatedSlab(
            random.Random(self.seed if seed is None else seed), self.num_lanes, self.failure_rate
        )
        source = prompt_stream(self.group_counts, lambda n: 4.0 if n % 5 == 0 else 1.0)
        keys = (
            "groups_per_step",
            "num_rollouts",
            "max_inflight",
            "weight_sync_interval",
            "buffer_max_staleness",
            "buffer_order",
            "reap_before_launch",
            "deterministic",
        )
        return AsyncRolloutScheduler(slab, source, **{key: getattr(self, key) for key in keys}), slab

    def run(self, seed: int | None = None) -> tuple[Run, AsyncRolloutScheduler, SimulatedSlab]:
        scheduler, slab = self.build(seed)
        run = train(
            scheduler,
            slab,
            rollouts=range(self.num_rollouts),
            train_s=self.train_s,
            extra_pushes=self.extra_pushes,
        )
        return run, scheduler, slab


def plans(**fixed: object) -> st.SearchStrategy[Plan]:
    parts: dict[str, st.SearchStrategy] = {
        "groups_per_step": st.integers(1, 5),
        "num_rollouts": st.integers(1, 12),
        "max_inflight": st.integers(1, 4),
        "weight_sync_interval": st.integers(1, 5),
        "buffer_max_staleness": st.integers(0, 3),
        "buffer_order": st.sampled_from(["oldest", "freshest"]),
        "reap_before_launch": st.booleans(),
        "deterministic": st.booleans(),
        "group_counts": st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
        "num_lanes": st.integers(1, 3),
        "failure_rate": st.sampled_from([0.0, 0.5]),
        "extra_pushes": st.sampled_from([0.0, 0.3]),
        "train_s": st.sampled_from([0.1, 4.0, 50.0]),
        "seed": st.integers(0, 2**32),
    }
    return st.builds(Plan, **(parts | {key: st.just(value) for key, value in fixed.items()}))


@interleavings
@given(plans())
def test_staleness_never_exceeds_the_bound(plan: Plan) -> None:
    run, scheduler, _ = plan.run()
    assert max(value for step in run.staleness for value in step) <= plan.buffer_max_staleness
    assert list(scheduler.stats.staleness) == run.staleness[-1]


@interleavings
@given(plans(buffer_order="oldest", extra_pushes=0.0))
def test_with_the_oldest_first_the_ceiling_alone_keeps_the_bound(plan: Plan) -> None:
    run, scheduler, _ = plan.run()
    assert scheduler.stats.num_evicted == 0
    assert max(value for step in run.staleness for value in step) <= plan.buffer_max_staleness


@interleavings
@given(plans())
def test_no_prompt_is_lost_skipped_or_trained_twice(plan: Plan) -> None:
    run, scheduler, _ = plan.run()
    assert all(len(step) == plan.groups_per_step for step in run.steps)
    expected = [f"p{n}" for n in range(plan.num_rollouts * plan.groups_per_step)]
    assert sorted(run.trained_ids) == sorted(expected)
    stats = scheduler.stats
    assert (stats.num_inflight_groups, stats.num_buffered_groups) == (0, 0)
    assert stats.num_reissued == stats.num_evicted


@interleavings
@given(plans(extra_pushes=0.3))
def test_an_evicted_prompt_is_generated_again_under_its_old_id_and_counted(plan: Plan) -> None:
    run, scheduler, slab = plan.run()
    launched = Counter(group_id for call in slab.calls if call[0] == "launch" for group_id in call[1])
    assert sum(launched.values()) - len(launched) == scheduler.stats.num_evicted
    assert set(launched) == set(run.trained_ids)


@interleavings
@given(plans(reap_before_launch=True, max_inflight=1))
def test_reap_first_with_one_inflight_returns_with_one_generation_in_flight(plan: Plan) -> None:
    scheduler, slab = plan.build()

    def check(rollout_id: int, groups: list[Group]) -> None:
        stats = scheduler.stats
        window = rollout_id // plan.weight_sync_interval
        ceiling = min(plan.num_rollouts, (window + 1 + plan.buffer_max_staleness) * plan.weight_sync_interval)
        committed = stats.num_trained_groups + stats.num_inflight_groups + stats.num_buffered_groups
        assert committed <= ceiling * plan.groups_per_step
        if committed < ceiling * plan.groups_per_step:
            assert stats.num_inflight_generations == 1

    train(
        scheduler,
        slab,
        rollouts=range(plan.num_rollouts),
        train_s=plan.train_s,
        after_step=check,
        extra_pushes=plan.extra_pushes,
    )


@interleavings
@given(plans(reap_before_launch=True, max_inflight=1))
def test_reap_first_always_reaps_an_idle_rollout_slab(plan: Plan) -> None:
    scheduler, slab = plan.build()
    collect = slab.collect

    def collect_from_an_idle_slab(handle):
        assert slab.num_running == 0
        return collect(handle)

    slab.collect = collect_from_an_idle_slab
    train(
        scheduler,
        slab,
        rollouts=range(plan.num_rollouts),
        train_s=plan.train_s,
        extra_pushes=plan.extra_pushes,
    )


def plain_plan(**changes: object) -> Plan:
    values: dict = {
        "groups_per_step": 4,
        "num_rollouts": 8,
        "max_inflight": 1,
        "weight_sync_interval": 4,
        "buffer_max_staleness": 2,
        "buffer_order": "oldest",
        "reap_before_launch": False,
        "deterministic": False,
        "group_counts": (4,),
        "num_lanes": 1,
        "failure_rate": 0.0,
        "extra_pushes": 0.0,
        "train_s": 6.0,
        "seed": 0,
    }
    return Plan(**(values | changes))


def inflight_after_each_step(plan: Plan) -> tuple[list[int], list[tuple]]:
    scheduler, slab = plan.build()
    counts: list[int] = []

    def note(rollout_id: int, groups: list[Group]) -> None:
        counts.append(scheduler.stats.num_inflight_generations)
        slab.calls.append(("train", rollout_id))

    train(scheduler, slab, rollouts=range(plan.num_rollouts), train_s=plan.train_s, after_step=note)
    return counts, [call for call in slab.calls if call[0] != "is_ready"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_launch_first_with_one_is_serial(deterministic: bool) -> None:
    counts, calls = inflight_after_each_step(plain_plan(deterministic=deterministic, buffer_max_staleness=0))
    assert counts == [0] * 8
    assert [call[0] for call in calls[:6]] == ["launch", "collect", "train"] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_launch_first_with_two_overlaps(deterministic: bool) -> None:
    plan = plain_plan(max_inflight=2, deterministic=deterministic)
    counts, calls = inflight_after_each_step(plan)
    assert [call[0] for call in calls[:4]] == ["launch", "launch", "collect", "train"]
    # Eight rollouts in all, so only the last step has nothing left beside it.
    assert min(counts[:3]) == 1 and counts[-1] == 0


@pytest.mark.parametrize("deterministic", [False, True])
def test_reap_first_calls_in_order_reap_then_launch_then_train(deterministic: bool) -> None:
    counts, calls = inflight_after_each_step(plain_plan(reap_before_launch=True, deterministic=deterministic))
    names = [call[0] for call in calls]
    assert names[:7] == ["launch", "collect", "launch", "train", "collect", "launch", "train"]
    # Eight rollouts in all: only the last step has nothing left to launch.
    assert counts == [1] * 7 + [0]


def test_overlap_makes_a_step_as_long_as_the_slower_of_the_two() -> None:
    """Generation and training of 10 s each, 20 rollouts: 20 * 20 s serial, 10 s + 20 * 10 s overlapped."""

    def wall_s(reap_before_launch: bool) -> float:
        slab = SimulatedSlab(random.Random(0), jitter=0.0)
        source = prompt_stream([2], lambda n: 5.0)
        scheduler = AsyncRolloutScheduler(
            slab,
            source,
            groups_per_step=2,
            num_rollouts=20,
            weight_sync_interval=4,
            buffer_max_staleness=2,
            reap_before_launch=reap_before_launch,
        )
        for rollout_id in range(20):
            scheduler.next_step(rollout_id)
            slab.now_s += 10.0
            if (rollout_id + 1) % 4 == 0:
                scheduler.drain()
                scheduler.on_push()
                slab.push()
        return slab.now_s

    assert wall_s(reap_before_launch=False) == 400.0
    assert wall_s(reap_before_launch=True) == 210.0


def test_staleness_zero_starts_each_window_cold_and_staleness_two_does_not() -> None:
    """Interval 4: bound 0 stops the ceiling at the push, bound 2 has the next rollout there already."""
    cold, _ = inflight_after_each_step(plain_plan(reap_before_launch=True, buffer_max_staleness=0))
    warm, _ = inflight_after_each_step(plain_plan(reap_before_launch=True, buffer_max_staleness=2))
    assert cold == [1, 1, 1, 0, 1, 1, 1, 0]
    assert warm == [1, 1, 1, 1, 1, 1, 1, 0]


@interleavings
@given(plans(failure_rate=0.5))
def test_a_reap_is_complete_or_nothing(plan: Plan) -> None:
    scheduler, slab = plan.build()
    run = Run()
    for rollout_id in range(plan.num_rollouts):
        while True:
            before = scheduler.stats
            first_call = len(slab.calls)
            try:
                groups = scheduler.next_step(rollout_id)
            except OSError:
                after = scheduler.stats
                collected = sum(len(call[1]) for call in slab.calls[first_call:] if call[0] == "collect")
                launched = sum(len(call[1]) for call in slab.calls[first_call:] if call[0] == "launch")
                assert after.num_buffered_groups == before.num_buffered_groups + collected
                assert after.num_inflight_groups == before.num_inflight_groups + launched - collected
                continue
            break
        run.steps.append(groups)
        slab.now_s += plan.train_s
        if (rollout_id + 1) % plan.weight_sync_interval == 0:
            retried(scheduler.drain, run)
            slab.push()
            scheduler.on_push()
    assert len(set(run.trained_ids)) == plan.num_rollouts * plan.groups_per_step


def test_first_error_is_raised_after_the_sweep() -> None:
    plan = plain_plan(max_inflight=3, num_lanes=3)
    scheduler, slab = plan.build()
    scheduler.next_step(0)
    scheduler._top_up(0)  # three in flight again
    first, second, third = (generation.handle for generation in scheduler._inflight)
    first.failures_left = second.failures_left = 1
    slab.now_s = 1e6
    with pytest.raises(OSError, match=first.request.rows[0][0]) as caught:
        scheduler.next_step(1)
    assert third.collected and not first.collected and not second.collected
    assert any(second.request.rows[0][0] in note for note in caught.value.__notes__)
    assert scheduler.stats.num_inflight_generations >= 2
    assert len(scheduler.next_step(1)) == 4


def test_a_failed_launch_loses_no_prompt() -> None:
    scheduler, slab = plain_plan(num_rollouts=1).build()
    launch = slab.launch
    failures = iter([OSError("no worker"), OSError("no worker")])

    def flaky(request):
        for failure in failures:
            raise failure
        return launch(request)

    slab.launch = flaky
    for _ in range(2):
        with pytest.raises(OSError, match="no worker"):
            scheduler.next_step(0)
    assert [group.group_id for group in scheduler.next_step(0)] == ["p0", "p1", "p2", "p3"]


@settings(max_examples=400, deadline=None)
@given(plans(deterministic=True, failure_rate=0.0, extra_pushes=0.0), st.data())
def test_a_resumed_run_equals_an_uninterrupted_one(plan: Plan, data: st.DataObject) -> None:
    """At any step boundary, drained or not, and with another clock after the restart."""
    whole, _, _whole_slab = plan.run()
    stop_at = data.draw(st.integers(0, plan.num_rollouts), label="stop_at")
    scheduler, slab = plan.build()
    run = train(scheduler, slab, rollouts=range(stop_at), train_s=plan.train_s)
    counts, groups = scheduler.state_dict()

    resumed, new_slab = plan.build(seed=plan.seed + 1)
    new_slab.push_version = slab.push_version
    resumed.load_state_dict(json.loads(json.dumps(counts)), groups)
    assert resumed.state_dict() == (counts, groups)
    train(resumed, new_slab, rollouts=range(stop_at, plan.num_rollouts), train_s=plan.train_s, run=run)
    assert run.steps == whole.steps
    assert run.staleness == whole.staleness


def test_a_resumed_run_issues_interrupted_work_once() -> None:
    scheduler, _slab = plain_plan(reap_before_launch=True).build()
    scheduler.next_step(0)
    counts, groups = scheduler.state_dict()
    assert scheduler.stats.num_inflight_generations == 1

    resumed, new_slab = plain_plan(reap_before_launch=True).build()
    resumed.load_state_dict(counts, groups)
    resumed.next_step(1)
    launches = [call[1] for call in new_slab.calls if call[0] == "launch"]
    assert launches == [("p4", "p5", "p6", "p7"), ("p8", "p9", "p10", "p11")]


def test_a_state_of_another_batch_size_or_with_other_groups_is_refused() -> None:
    scheduler, _ = plain_plan(reap_before_launch=True, group_counts=(7,)).build()
    scheduler.next_step(0)
    counts, groups = scheduler.state_dict()
    assert groups
    other, _ = plain_plan(groups_per_step=3).build()
    with pytest.raises(ValueError, match="batch_size"):
        other.load_state_dict(counts, groups)
    same, _ = plain_plan().build()
    with pytest.raises(ValueError, match="do not belong together"):
        same.load_state_dict(counts, groups[:-1])


@pytest.mark.parametrize("buffer_order", ["oldest", "freshest"])
@pytest.mark.parametrize("reap_before_launch", [False, True])
def test_costly_prompts_keep_their_share(buffer_order: str, reap_before_launch: bool) -> None:
    """One prompt in five costs four times as much; on four lanes, a prompt each, the quick ones overtake."""
    slab = SimulatedSlab(random.Random(3), num_lanes=4)
    source = prompt_stream([1], lambda n: 4.0 if n % 5 == 0 else 1.0)
    scheduler = AsyncRolloutScheduler(
        slab,
        source,
        groups_per_step=10,
        num_rollouts=500,
        max_inflight=4,
        weight_sync_interval=1,
        buffer_max_staleness=1,
        buffer_order=buffer_order,
        reap_before_launch=reap_before_launch,
    )
    run = train(scheduler, slab, rollouts=range(450), train_s=5.0)
    costly = sum(group.cost_s == 4.0 for step in run.steps for group in step)
    assert costly / 4500 == pytest.approx(1 / 5, abs=0.002)
    if buffer_order == "freshest":
        assert scheduler.stats.num_evicted > 0


@interleavings
@given(plans(deterministic=True, failure_rate=0.0, extra_pushes=0.0))
def test_deterministic_schedule_ignores_clocks(plan: Plan) -> None:
    run, _, slab = plan.run()
    other_run, _, other_slab = plan.run(seed=plan.seed + 1)
    assert slab.calls == other_slab.calls
    assert run.steps == other_run.steps
    assert ("is_ready",) not in slab.calls


def test_freshest_takes_the_latest_generation_first_and_oldest_the_earliest() -> None:
    def second_step(order: str) -> list[str]:
        scheduler, _slab = plain_plan(max_inflight=3, buffer_order=order).build()
        scheduler.next_step(0)
        scheduler.drain()
        return [group.group_id for group in scheduler.next_step(1)]

    assert second_step("oldest") == ["p4", "p5", "p6", "p7"]
    assert second_step("freshest") == ["p8", "p9", "p10", "p11"]


def test_a_push_under_a_running_generation_is_refused() -> None:
    scheduler, _ = plain_plan(reap_before_launch=True).build()
    scheduler.next_step(0)
    with pytest.raises(AssertionError, match="running generation"):
        scheduler.on_push()


def test_a_group_that_records_another_version_than_its_launch_is_refused() -> None:
    scheduler, slab = plain_plan().build()
    slab.push_version = 1
    with pytest.raises(RuntimeError, match=r"version 0, but its groups record \[1\]"):
        scheduler.next_step(0)


def test_a_generation_that_returns_other_groups_than_asked_is_refused() -> None:
    scheduler, slab = plain_plan().build()
    collect = slab.collect
    slab.collect = lambda handle: collect(handle)[:-1]
    with pytest.raises(RuntimeError, match="was asked for groups"):
        scheduler.next_step(0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("groups_per_step", 0),
        ("num_rollouts", -1),
        ("max_inflight", 0),
        ("weight_sync_interval", 0),
        ("buffer_max_staleness", -1),
        ("buffer_order", "newest"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        plain_plan(**{key: value}).build()


def test_steps_are_asked_for_in_order() -> None:
    scheduler, _ = plain_plan().build()
    with pytest.raises(ValueError, match="next one in order is 0"):
        scheduler.next_step(1)
    with pytest.raises(ValueError, match="num_rollouts is 8"):
        scheduler.next_step(8)


def test_an_empty_request_is_refused() -> None:
    slab = SimulatedSlab(random.Random(0))
    scheduler = AsyncRolloutScheduler(slab, lambda index: Prompts(()), groups_per_step=1, num_rollouts=1)
    with pytest.raises(ValueError, match="request 0 holds no prompts"):
        scheduler.next_step(0)


def in_flight_with_a_broken_transfer() -> tuple[AsyncRolloutScheduler, SimulatedSlab]:
    scheduler, slab = plain_plan(reap_before_launch=True).build()
    scheduler.next_step(0)
    slab.handles[-1].failures_left = 99
    return scheduler, slab


def test_the_first_exception_survives_teardown_with_the_drains_error_attached() -> None:
    scheduler, _ = in_flight_with_a_broken_transfer()
    with pytest.raises(ArithmeticError, match="loss is not finite") as caught, drained_at_exit(scheduler):
        raise ArithmeticError("loss is not finite")
    assert any("transfer of p4 failed" in note for note in caught.value.__notes__)


def test_a_drain_that_fails_with_nothing_else_wrong_propagates() -> None:
    scheduler, _ = in_flight_with_a_broken_transfer()
    with pytest.raises(OSError, match="transfer of p4 failed"), drained_at_exit(scheduler):
        pass


def test_teardown_leaves_nothing_in_flight() -> None:
    scheduler, slab = plain_plan(reap_before_launch=True).build()
    with pytest.raises(KeyboardInterrupt), drained_at_exit(scheduler):
        scheduler.next_step(0)
        raise KeyboardInterrupt
    assert scheduler.stats.num_inflight_generations == 0
    assert slab.num_running == 0


def test_a_state_saved_between_a_step_and_its_push_runs_interrupted_work_before_the_push() -> None:
    """The version that the interrupted generation was launched under must still be the engine's."""
    plan = plain_plan(reap_before_launch=True, weight_sync_interval=1, num_rollouts=3)
    scheduler, _ = plan.build()
    scheduler.next_step(0)
    counts, groups = scheduler.state_dict()

    resumed, slab = plan.build()
    resumed.load_state_dict(counts, groups)
    resumed.drain()
    slab.push()
    resumed.on_push()
    assert [group.push_version for group in resumed.next_step(1)] == [0, 0, 0, 0]
    assert resumed.stats.staleness == (1, 1, 1, 1)


@interleavings
@given(plans())
def test_a_step_waits_for_the_oldest_generation_in_flight(plan: Plan) -> None:
    scheduler, slab = plan.build()
    wait = slab.wait

    def checked_wait(handle):
        uncollected = [other for other in slab.handles if not other.collected]
        if handle.ends_at_s > slab.now_s:
            # Older ones may only be left because their own collection failed in this very sweep.
            assert all(other.ends_at_s <= slab.now_s for other in uncollected[: uncollected.index(handle)])
        wait(handle)

    slab.wait = checked_wait
    train(scheduler, slab, rollouts=range(plan.num_rollouts), train_s=plan.train_s)
