# SPDX-License-Identifier: Apache-2.0
"""Whether the trainer replays what the rollout engine did: fingerprints of layouts, and ratios that must be
1.
"""

from unirl.parity.compare import LayoutMismatch, compare, mismatching_rows
from unirl.parity.drift import Drift, DriftLine, measure_drift, render_drift
from unirl.parity.guard import RatioGuard, RatioMismatch, RowDrift, default_tolerance

__all__ = [
    "Drift",
    "DriftLine",
    "LayoutMismatch",
    "RatioGuard",
    "RatioMismatch",
    "RowDrift",
    "compare",
    "default_tolerance",
    "measure_drift",
    "mismatching_rows",
    "render_drift",
]
