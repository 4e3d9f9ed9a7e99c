# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

from unirl.metrics import ConsoleSink, format_rollout

METRICS = {
    "reward": 0.41234,
    "ratio": 1.0 + 3.1e-9,
    "clip": 0.1,
    "clip_max": 0.4,
    "gn": 0.0021,
    "perf/generate_s": 0.3,
    "perf/transfer_s": 0.01,
    "perf/score_s": 0.02,
    "perf/train_s": 0.14,
    "perf/push_s": 0.005,
    "async/staleness": 1,
    "async/policy_lag": 2,
}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rollout_is_one_line_with_the_ratio_in_scientific_form() -> None:
    assert format_rollout(2, 30, METRICS) == (
        " 3/30 reward 0.412 |ratio-1| 3.1e-09 clip 0.100 (max 0.400) gn 2.1e-03 "
        "| gen 0.30 xfer 0.01 score 0.02 train 0.14 push 0.01 s | stale 1 lag 2"
    )


def test_the_ratio_shown_is_that_of_rows_replayed_under_their_own_weights_where_there_are_any() -> None:
    moved = {"ratio": 1.25, "parity/abs_ratio_minus_one_max": 0.0}
    assert format_rollout(0, 9, moved) == "1/9 |ratio-1| 0.0e+00"
    assert format_rollout(0, 9, {"ratio": 0.75}) == "1/9 |ratio-1| 2.5e-01"


def test_dropped_rows_and_skipped_steps_are_shown_when_there_are_some() -> None:
    line = format_rollout(0, 9, {"reward": 0.5, "rows/dropped": 3, "train/skipped_steps": 1})
    assert line == "1/9 reward 0.500 | dropped rows 3 | skipped steps 1"
    assert (
        format_rollout(0, 9, {"reward": 0.5, "rows/dropped": 0, "train/skipped_steps": 0})
        == "1/9 reward 0.500"
    )


def test_plain_mode_prints_one_line_a_rollout_with_the_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(30, mode="auto", stream=stream, clock=clock)
    for step, seconds in enumerate((40.0, 2.0, 2.0)):
        clock.now += seconds
        sink.write(step, METRICS)
    sink.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("| ? left")  # the first rollout holds the start-up
    assert lines[1].endswith("| 0:56 left") and lines[2].endswith("| 0:54 left")  # 28 and 27 rollouts at 2 s


def test_an_evaluation_is_its_own_line_and_no_rollout() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(30, mode="plain", stream=stream)
    sink.write(
        0,
        {
            "eval/digit": 0.389,
            "eval/svm": 0.43,
            "eval/reward": 0.389,
            "eval/version": 0,
            "eval/held/reward": 0.25,
        },
    )
    sink.close()
    assert (
        stream.getvalue() == "eval at 0 (policy version 0): reward 0.389 svm 0.430\n     held: reward 0.250\n"
    )


def test_a_terminal_gets_the_line_and_a_progress_bar() -> None:
    stream, clock = io.StringIO(), Clock()
    sink = ConsoleSink(2, mode="rich", stream=stream, clock=clock)
    sink.message("plan: [2 rollouts]")
    for step in range(2):
        clock.now += 3
        sink.write(step, METRICS)
    sink.close()
    sink.close()
    text = stream.getvalue()
    assert "plan: [2 rollouts]" in text and "|ratio-1| 3.1e-09" in text
    assert "2/2" in text and "0:00 left" in text
