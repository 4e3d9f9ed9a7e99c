# SPDX-License-Identifier: Apache-2.0
"""Before any optimizer step a replay must give the rollout's log-probs back. The guard says how well it does,
and when it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

DRIFTS_PER_CLIP_RANGE = 5.0


class RatioMismatch(ValueError):  # noqa: N818 (a state of affairs, not a kind of error)
    """Replayed log-probs are further from the rollout's than `stack.first_update_ratio_tol` allows."""


@dataclasses.dataclass(frozen=True)
class RowDrift:
    """One row's largest |replayed - stored log-prob|, and |ratio - 1|, under the weights that generated
    it.
    """

    row_id: str
    canvas: str
    abs_dlogp: float
    abs_ratio_minus_one: float


def default_tolerance(dtype: str) -> float:
    """The tolerance on |delta log-prob| when none is set: 1e-6 in float32, 1e-4 in bfloat16."""
    allowed = {"float32": 1e-6, "bfloat16": 1e-4}
    if dtype not in allowed:
        raise ValueError(f"model.dtype is {dtype!r}; allowed: {', '.join(allowed)}")
    return allowed[dtype]


class RatioGuard:
    """Judges the drifts of each rollout.

    Args:
        tolerance: on |delta log-prob|. action: what a breach is, a warning or an error (raised by the caller,
            on every rank at once).
        clip_range: the algorithm's; drifts are told in units of it too, since a ratio that is off by a clip
            range is noise that clips.
    """

    def __init__(self, *, tolerance: float, action: Literal["warn", "raise"], clip_range: float) -> None:
        if not tolerance >= 0:
            raise ValueError(f"stack.first_update_ratio_tol is {tolerance}; allowed: 0 or more")
        if action not in ("warn", "raise"):
            raise ValueError(f"stack.first_update_ratio_action is {action!r}; allowed: warn, raise")
        self.tolerance = tolerance
        self.action = action
        self.clip_range = clip_range
        self._warned_of_clip_range = False

    def breaches(self, drifts: Sequence[RowDrift]) -> list[str]:
        """One message a canvas that is past the tolerance, naming its worst row. A drift that is not a number
        is past any.
        """
        messages = []
        for canvas in dict.fromkeys(d.canvas for d in drifts):
            rows = [d for d in drifts if d.canvas == canvas]
            beyond = [d for d in rows if not d.abs_dlogp <= self.tolerance]
            if beyond:
                worst = max(beyond, key=lambda d: math.inf if math.isnan(d.abs_dlogp) else d.abs_dlogp)
                messages.append(
                    "replay does not give the rollout's log-probs back: |delta log-prob| "
                    f"{worst.abs_dlogp:.2e} "
                    f"({worst.abs_dlogp / self.clip_range:.2e} clip ranges) on canvas {canvas}, row "
                    f"{worst.row_id!r}; {self._tolerated()}, passed by {len(beyond)} of {len(rows)} rows"
                )
        return messages

    def _tolerated(self) -> str:
        if self.tolerance == 0:
            return "no difference is tolerated (key parity.bitwise)"
        return f"tolerance {self.tolerance:.2e} (key stack.first_update_ratio_tol)"

    def clip_range_warning(self, drifts: Sequence[RowDrift]) -> str | None:
        """Once a run: the clip range is not well above the numerical noise of the ratio, so clipping is
        partly noise.
        """
        largest = max((d.abs_dlogp for d in drifts), default=0.0)
        if self._warned_of_clip_range or not self.clip_range < DRIFTS_PER_CLIP_RANGE * largest:
            return None
        self._warned_of_clip_range = True
        return (
            f"algorithm.clip_range {self.clip_range:.2e} is less than {DRIFTS_PER_CLIP_RANGE:g} x the "
            f"measured drift {largest:.2e} of the "
            "replayed log-probs: numerical noise alone clips; raise algorithm.clip_range above "
            f"{DRIFTS_PER_CLIP_RANGE * largest:.1e}"
        )
