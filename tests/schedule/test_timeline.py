# SPDX-License-Identifier: Apache-2.0
"""Tail ratio, idle time and the trace of what ranks did."""

from __future__ import annotations

import json

import pytest

from unirl.schedule.cost import TokenCount
from unirl.schedule.policies import StealPolicy
from unirl.schedule.simulate import EXAMPLE_MIX, parse_mix, simulate
from unirl.schedule.timeline import Call, CallTimeline, chrome_trace, read_trace
from unirl.schedule.units import build_unit_table


def call(rank: int, start: float, end: float, phase: str = "generate") -> Call:
    return Call(rank, start, end, phase, "g", 1, "8x8")


def test_the_tail_ratio_is_makespan_over_the_work_shared_equally() -> None:
    timeline = CallTimeline((call(0, 100.0, 104.0), call(1, 100.0, 101.0), call(1, 101.0, 102.0)), 2)
    assert timeline.makespan == 4.0
    assert timeline.ideal == 3.0
    assert timeline.tail_ratio == pytest.approx(4.0 / 3.0)
    assert timeline.idle == [0.0, 2.0]


def test_scoring_beside_generation_counts_once() -> None:
    calls = (call(0, 0.0, 2.0), call(0, 2.0, 4.0), call(0, 2.0, 3.0, "score"), call(0, 4.0, 5.0, "score"))
    timeline = CallTimeline(calls, 1)
    assert timeline.busy == [5.0]
    assert timeline.tail_ratio == 1.0


def test_a_rank_without_calls_is_idle_all_the_time() -> None:
    timeline = CallTimeline((call(0, 1.0, 3.0),), 2)
    assert timeline.idle == [0.0, 2.0]
    assert timeline.tail_ratio == 2.0


def test_the_trace_has_one_event_a_call_and_names_stolen_work() -> None:
    groups, num_ranks = parse_mix(EXAMPLE_MIX, rows_a_group=16)
    table = build_unit_table(groups, TokenCount(), max_rows=4)
    simulated = simulate(table, num_ranks, StealPolicy())
    trace = json.loads(json.dumps(chrome_trace([("steal", simulated.calls(table))], scale_us=1.0)))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == len(simulated.spans)
    assert sum("stolen" in event["cat"] for event in events) == simulated.num_stolen_units > 0
    assert sum(event["args"]["rows"] for event in events) == 32 * 16
    assert max(event["ts"] + event["dur"] for event in events) == simulated.makespan


def test_a_trace_is_read_back() -> None:
    calls = (call(0, 50.0, 52.0), call(0, 52.0, 52.5, "score"), call(2, 50.5, 51.0)._replace(stolen=True))
    timeline = CallTimeline(calls, 3)
    ((name, back),) = read_trace(json.loads(json.dumps(chrome_trace([("rollout 3", timeline)]))))
    assert name == "rollout 3" and back.num_ranks == 3
    assert back.tail_ratio == pytest.approx(timeline.tail_ratio)
    assert [c._replace(start=0.0, end=0.0) for c in back.calls] == [
        c._replace(start=0.0, end=0.0) for c in calls
    ]


def test_another_programs_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="no timeline of a rollout"):
        read_trace({"traceEvents": [{"ph": "X", "pid": 0}]})
