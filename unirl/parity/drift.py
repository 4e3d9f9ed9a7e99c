# SPDX-License-Identifier: Apache-2.0
"""How far replayed log-probs are from stored ones, by step, by canvas and by row, the worst first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from unirl.parity.compare import table


@dataclasses.dataclass(frozen=True)
class DriftLine:
    """The transitions of one step, canvas or row.

    Attributes:
        name: of the step, canvas or row.
        count: transitions.
        abs_dlogp_max, abs_dlogp_mean: of |replayed - stored log-prob|; NaN when any is.
        abs_ratio_minus_one_max: of |exp(replayed - stored) - 1|.
    """

    name: str
    count: int
    abs_dlogp_max: float
    abs_dlogp_mean: float
    abs_ratio_minus_one_max: float


@dataclasses.dataclass(frozen=True)
class Drift:
    """Every transition three times: by step, by canvas and by row, each list with the worst first."""

    by_step: tuple[DriftLine, ...]
    by_canvas: tuple[DriftLine, ...]
    by_row: tuple[DriftLine, ...]

    @property
    def abs_dlogp_max(self) -> float:
        """The largest |delta log-prob| of all; NaN when any is, 0 when there is no transition."""
        return self.by_row[0].abs_dlogp_max if self.by_row else 0.0


def measure_drift(
    replayed: torch.Tensor,
    stored: torch.Tensor,
    steps: torch.Tensor,
    canvases: Sequence[str],
    ids: Sequence[str],
) -> Drift:
    """Compares `[N, S]` log-probs.

    Args:
        replayed, stored: under the same weights.
        steps: int64 `[N, S]`, the step index of every transition.
        canvases, ids: one a row.
    """
    delta = (replayed.detach().double() - stored.to(replayed.device).double()).cpu()
    rows, slots = delta.shape
    flat = delta.flatten()
    step_names = [f"step {step}" for step in steps.flatten().tolist()]
    return Drift(
        by_step=_lines(flat, step_names),
        by_canvas=_lines(flat, [name for name in canvases for _ in range(slots)]),
        by_row=_lines(flat, [ids[row] for row in range(rows) for _ in range(slots)]),
    )


def render_drift(drift: Drift, *, clip_range: float, max_rows: int = 10) -> str:
    """Three tables in scientific notation, also in units of the clip range; `max_rows` rows at most."""
    parts = [
        _render("step", drift.by_step, clip_range),
        _render("canvas", drift.by_canvas, clip_range),
        _render("row", drift.by_row[:max_rows], clip_range),
    ]
    rest = len(drift.by_row) - max_rows
    if rest > 0:
        parts[-1] += f"\n  ... and {rest} rows that are no worse"
    return "\n\n".join(parts)


def _lines(delta: torch.Tensor, names: Sequence[str]) -> tuple[DriftLine, ...]:
    members: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        members.setdefault(name, []).append(position)
    lines = []
    for name, positions in members.items():
        of = delta[positions]
        lines.append(
            DriftLine(
                name,
                len(positions),
                float(of.abs().max()),
                float(of.abs().mean()),
                float(torch.expm1(of).abs().max()),
            )
        )
    return tuple(sorted(lines, key=_badness, reverse=True))


def _badness(line: DriftLine) -> tuple[float, float]:
    return tuple(math.inf if math.isnan(v) else v for v in (line.abs_dlogp_max, line.abs_dlogp_mean))  # type: ignore[return-value]


def _render(what: str, lines: Sequence[DriftLine], clip_range: float) -> str:
    head = (what, "transitions", "max |dlogp|", "mean |dlogp|", "max |ratio-1|", "clip ranges")
    body = [
        (
            line.name,
            str(line.count),
            f"{line.abs_dlogp_max:.2e}",
            f"{line.abs_dlogp_mean:.2e}",
            f"{line.abs_ratio_minus_one_max:.2e}",
            f"{line.abs_dlogp_max / clip_range:.2e}",
        )
        for line in lines
    ]
    return table(head, body)
