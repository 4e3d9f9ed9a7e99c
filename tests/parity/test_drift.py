# SPDX-License-Identifier: Apache-2.0
"""Drift tables: every transition counted by step, by canvas and by row, the worst first."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.parity import measure_drift, render_drift

STORED = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]], dtype=torch.float64)
DELTA = torch.tensor([[0.0, 1e-6], [-4e-6, 2e-6], [3e-9, 0.0]], dtype=torch.float64)
STEPS = torch.tensor([[0, 2], [0, 3], [1, 2]])
CANVASES = ["8x8", "12x8", "8x8"]
IDS = ["r0.p0/0", "r0.p1/0", "r0.p0/1"]


def test_lines_have_maxima_and_means_of_their_transitions_worst_first() -> None:
    drift = measure_drift(STORED + DELTA, STORED, STEPS, CANVASES, IDS)
    assert [line.name for line in drift.by_row] == ["r0.p1/0", "r0.p0/0", "r0.p0/1"]
    assert [line.name for line in drift.by_canvas] == ["12x8", "8x8"]
    assert [line.name for line in drift.by_step] == ["step 0", "step 3", "step 2", "step 1"]
    worst = drift.by_canvas[0]
    assert worst.count == 2
    assert worst.abs_dlogp_max == pytest.approx(4e-6) and worst.abs_dlogp_mean == pytest.approx(3e-6)
    assert worst.abs_ratio_minus_one_max == pytest.approx(4e-6 - 8e-12, rel=1e-9)
    assert drift.by_canvas[1].abs_dlogp_mean == pytest.approx((1e-6 + 3e-9) / 4, rel=1e-5)
    assert drift.abs_dlogp_max == worst.abs_dlogp_max


def test_not_a_number_is_worse_than_any_number() -> None:
    broken = STORED + DELTA
    broken[2, 0] = math.nan
    drift = measure_drift(broken, STORED, STEPS, CANVASES, IDS)
    assert drift.by_row[0].name == "r0.p0/1" and math.isnan(drift.abs_dlogp_max)


def test_tables_are_scientific_and_in_clip_ranges_and_cut_long_lists() -> None:
    text = render_drift(
        measure_drift(STORED + DELTA, STORED, STEPS, CANVASES, IDS), clip_range=1e-4, max_rows=1
    )
    lines = [line.split() for line in text.splitlines()]
    assert ["r0.p1/0", "2", "4.00e-06", "3.00e-06", "4.00e-06", "4.00e-02"] in lines
    assert "r0.p0/0" not in text and "2 rows that are no worse" in text


def test_no_transitions_have_no_drift() -> None:
    nothing = torch.zeros(3, 0)
    drift = measure_drift(nothing, nothing, torch.zeros(3, 0, dtype=torch.int64), CANVASES, IDS)
    assert drift.abs_dlogp_max == 0.0 and drift.by_row == ()
