# SPDX-License-Identifier: Apache-2.0
"""Whether the trainer replays what the rollout engine did: fingerprints of layouts, and ratios that must be
1.
"""

from unirl.parity.compare import LayoutMismatch, compare, mismatching_rows
from unirl.parity.guard import RatioGuard, RatioMismatch, RowDrift, default_tolerance

__all__ = [
    "LayoutMismatch",
    "RatioGuard",
    "RatioMismatch",
    "RowDrift",
    "compare",
    "default_tolerance",
    "mismatching_rows",
]
