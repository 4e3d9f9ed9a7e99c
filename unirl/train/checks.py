# SPDX-License-Identifier: Apache-2.0
"""What one training step finds out about the agreement of rollout and replay, before it moves a weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from unirl.metrics import Aggregate
from unirl.parity import (
    LayoutMismatch,
    RatioGuard,
    RatioMismatch,
    RowDrift,
    compare,
    mismatching_rows,
)
from unirl.protocols import Replay
from unirl.types import LayoutRecord, Part

NUM_FLAGS = 2
"""Numbers that ranks exchange with their gradients: rows laid out differently, breaches of the ratio guard.
"""


class ReplayChecks:
    """Collects observations of one training step. Nothing is read back from a GPU before `flags`.

    `parity` observations compare log-probs under the weights that generated a row, so they measure numerics
    only; `drift` observations are of rows from older weights replayed under the current ones: the policy's
    own movement.
    """

    def __init__(self, guard: RatioGuard, *, require_fingerprint: bool) -> None:
        self._guard = guard
        self._require = require_fingerprint
        self._layouts: list[_SeenLayout] = []
        self._parity: list[tuple[list[str], list[str], torch.Tensor]] = []
        self._drift: list[torch.Tensor] = []
        self._judged = 0
        self._drifts: list[RowDrift] = []
        self._breaches: list[str] = []
        self.warnings: list[str] = []

    def see_layout(self, micro: Part, replay: Replay) -> None:
        """Compares what the two transformers were given. A missing fingerprint is an error at once, being one
        on every rank.
        """
        if micro.fingerprints is None or replay.fingerprints is None:
            compare(micro.fingerprints, replay.fingerprints, micro.ids, require=self._require)
        else:
            different = mismatching_rows(micro.fingerprints, replay.fingerprints)
            self._layouts.append(
                _SeenLayout(
                    micro.ids,
                    micro.fingerprints,
                    replay.fingerprints,
                    micro.layouts,
                    replay.layouts,
                    different,
                )
            )

    def see_parity(
        self, micro: Part, rows: Sequence[int], replayed: torch.Tensor, stored: torch.Tensor
    ) -> None:
        """`rows` of the micro, replayed under their generating weights; `replayed`, `stored` are
        `[len(micro), S]`.
        """
        if rows:
            names = [f"{c.height}x{c.width}" for c in micro.canvases()]
            self._parity.append(
                ([micro.ids[r] for r in rows], [names[r] for r in rows], _row_max(replayed, stored, rows))
            )

    def see_drift(self, rows: Sequence[int], replayed: torch.Tensor, stored: torch.Tensor) -> None:
        """`rows` from older weights, replayed under the current ones."""
        if rows:
            self._drift.append(_row_max(replayed, stored, rows))

    def flags(self) -> tuple[int, int]:
        """This rank's (rows laid out differently, guard breaches that are errors) among what was not judged
        yet.
        """
        wrong = sum(int(seen.different.sum()) for seen in self._layouts)
        drifts = [
            RowDrift(row_id, canvas, *pair)
            for ids, canvases, values in self._parity[self._judged :]
            for row_id, canvas, pair in zip(ids, canvases, values.tolist(), strict=True)
        ]
        self._judged = len(self._parity)
        self._drifts += drifts
        self._breaches = self._guard.breaches(drifts)
        noise = self._guard.clip_range_warning(drifts)
        self.warnings += [
            *([noise] if noise else []),
            *(self._breaches if self._guard.action == "warn" else []),
        ]
        return wrong, len(self._breaches) if self._guard.action == "raise" else 0

    def raise_if_any(self, wrong_rows: int, breaches: int) -> None:
        """Raises on every rank when any rank has found something. The numbers are sums of `flags` over ranks."""
        if wrong_rows:
            for seen in self._layouts:
                if bool(seen.different.any()):
                    compare(
                        seen.worker,
                        seen.trainer,
                        seen.ids,
                        worker_fields=_fields(seen.worker_layouts),
                        trainer_fields=_fields(seen.trainer_layouts),
                    )
            raise LayoutMismatch(
                f"{wrong_rows} rows on other training ranks were laid out differently by the rollout worker",
                [],
            )
        if breaches:
            own = (
                "; ".join(self._breaches)
                or "another training rank's replay does not give the rollout's log-probs back"
            )
            raise RatioMismatch(f"{own} (stack.first_update_ratio_action: raise)")
        self._layouts.clear()

    def report(self, metrics: Aggregate) -> None:
        """Maxima over rows: `parity/*`, also by canvas, and `async/drift_*`."""
        for name in dict.fromkeys(d.canvas for d in self._drifts):
            _report_maxima(metrics, "parity/", [d for d in self._drifts if d.canvas == name], f"/{name}")
        _report_maxima(metrics, "parity/", self._drifts)
        if self._drifts:
            largest = _largest([d.abs_dlogp for d in self._drifts])
            metrics.maximum({"parity/abs_dlogp_max_clip_ranges": largest / self._guard.clip_range})
        moved = [RowDrift("", "", *pair) for values in self._drift for pair in values.tolist()]
        _report_maxima(metrics, "async/drift_", moved)
        if moved:
            share = sum(d.abs_ratio_minus_one > self._guard.clip_range for d in moved) / len(moved)
            metrics.mean({"async/drift_beyond_clip": share}, len(moved))


@dataclasses.dataclass(frozen=True)
class _SeenLayout:
    """What there is to say about one replay's layouts; the replay itself, with its graph, is not kept."""

    ids: tuple[str, ...]
    worker: torch.Tensor
    trainer: torch.Tensor
    worker_layouts: tuple[LayoutRecord, ...] | None
    trainer_layouts: tuple[LayoutRecord, ...] | None
    different: torch.Tensor


def _fields(layouts: Sequence[LayoutRecord] | None) -> list[dict[str, list[int]]] | None:
    return None if layouts is None else [layout.fields() for layout in layouts]


def _row_max(replayed: torch.Tensor, stored: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """`[rows, 2]` float64: each row's largest |delta log-prob| and |ratio - 1| (by expm1, exact however
    small).
    """
    index = torch.as_tensor(rows, dtype=torch.long, device=replayed.device)
    delta = (replayed.detach().double() - stored.to(replayed.device).double())[index]
    return torch.stack([delta.abs().amax(dim=1), torch.expm1(delta).abs().amax(dim=1)], dim=1)


def _largest(values: Sequence[float]) -> float:
    """NaN when any is: a maximum must not hide it."""
    return float(torch.tensor(values, dtype=torch.float64).max())


def _report_maxima(metrics: Aggregate, prefix: str, drifts: Sequence[RowDrift], suffix: str = "") -> None:
    if drifts:
        metrics.maximum(
            {
                f"{prefix}abs_dlogp_max{suffix}": _largest([d.abs_dlogp for d in drifts]),
                f"{prefix}abs_ratio_minus_one_max{suffix}": _largest([d.abs_ratio_minus_one for d in drifts]),
            }
        )
