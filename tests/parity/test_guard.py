# SPDX-License-Identifier: Apache-2.0
"""The ratio guard: what it tolerates, what it says, and how often."""

from __future__ import annotations

import math

import pytest

from unirl.parity import RatioGuard, RowDrift, default_tolerance


def _guard(**changes):
    return RatioGuard(**{"tolerance": 1e-6, "action": "warn", "clip_range": 1e-4, **changes})


def _drift(value: float, row: str = "r0.p0/0", canvas: str = "8x8") -> RowDrift:
    return RowDrift(row, canvas, value, abs(math.expm1(value)))


def test_default_tolerances():
    assert default_tolerance("float32") == 1e-6 and default_tolerance("bfloat16") == 1e-4
    with pytest.raises(ValueError, match=r"model\.dtype is 'float16'"):
        default_tolerance("float16")


def test_within_tolerance_is_silent():
    assert _guard().breaches([_drift(0.0), _drift(1e-6)]) == []


def test_breach_names_canvas_row_value_and_clip_ranges():
    drifts = [_drift(2e-5, "r0.p0/1"), _drift(3e-5, "r0.p0/2"), _drift(0.0), _drift(5e-5, "r0.p1/0", "16x16")]
    small, large = _guard().breaches(drifts)
    for piece in (
        "3.00e-05",
        "3.00e-01 clip ranges",
        "8x8",
        "r0.p0/2",
        "1.00e-06",
        "2 of 3 rows",
        "first_update_ratio_tol",
    ):
        assert piece in small
    assert "5.00e-05" in large and "16x16" in large and "r0.p1/0" in large


def test_not_a_number_is_past_any_tolerance():
    (message,) = _guard(tolerance=1e9).breaches([_drift(0.0), _drift(math.nan, "r0.p0/7")])
    assert "nan" in message and "r0.p0/7" in message


def test_clip_range_near_the_noise_is_said_once_a_run():
    guard = _guard(clip_range=1e-5)
    assert guard.clip_range_warning([_drift(1.9e-6)]) is None
    warning = guard.clip_range_warning([_drift(2.1e-6)])
    assert "1.00e-05" in warning and "2.10e-06" in warning and "algorithm.clip_range" in warning
    assert guard.clip_range_warning([_drift(2.1e-6)]) is None


def test_bad_settings_name_their_key():
    with pytest.raises(ValueError, match="first_update_ratio_tol is -1"):
        _guard(tolerance=-1)
    with pytest.raises(ValueError, match="first_update_ratio_action is 'stop'"):
        _guard(action="stop")
