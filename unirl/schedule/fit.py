# SPDX-License-Identifier: Apache-2.0
"""Fits the cost model to a sweep of measurements, and refuses a sweep that cannot tell its terms apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unirl.schedule.cost import CostModel
from unirl.schedule.units import Workload


@dataclass(frozen=True)
class Measurement:
    """One measured call: `num_rows` rows of `workload` took `seconds`."""

    workload: Workload
    num_rows: int
    seconds: float


@dataclass(frozen=True)
class FitReport:
    """A fitted model and how well it predicts. Errors are relative: |predicted - measured| / measured.

    `r_squared` and `worst_error` are over the sweep. The held-out errors are means over points that were not
    fitted, and None without any; `token_count_error` is that of a constant times the token count, fitted to
    the same sweep. `zeroed` names terms that least squares made negative: no time is, so they were set to 0
    and the rest fitted again.
    """

    model: CostModel
    r_squared: float
    worst_error: float
    worst_measurement: Measurement
    zeroed: tuple[str, ...]
    held_out_error: float | None
    token_count_error: float | None

    @property
    def beats_token_count(self) -> bool | None:
        """Whether the model predicts held-out points better than token count; None without any."""
        if self.held_out_error is None or self.token_count_error is None:
            return None
        return self.held_out_error < self.token_count_error

    def summary(self) -> str:
        """What a person should read after a fit, in a few lines."""
        lines = [f"R^2 {self.r_squared:.6f}, worst error {self.worst_error:.1%} at {self.worst_measurement}"]
        if self.zeroed:
            lines.append(f"set to 0 because they came out negative: {', '.join(self.zeroed)}")
        if self.held_out_error is not None and self.token_count_error is not None:
            lines.append(
                f"held-out points: {self.held_out_error:.1%} mean error, token count {self.token_count_error:.1%}"
            )
            if not self.beats_token_count:
                lines.append("token count predicts better than this model: leave reward_stack.cost unset")
        return "\n".join(lines)


# Each term: its column of the design matrix, and what a sweep needs to tell it from the others.
_TERMS: dict[str, tuple[Callable[[Workload, int], float], str]] = {
    "a": (
        lambda w, n: w.steps * w.branches * n * w.tokens,
        "two or more canvases and two or more row counts",
    ),
    "b": (
        lambda w, n: w.steps * w.branches * n * w.tokens**2,
        "two or more canvases and two or more row counts",
    ),
    "g": (lambda w, n: w.steps * w.branches * n * w.tokens * w.prefix_tokens, "two or more prefix lengths"),
    "c": (lambda w, n: w.steps * w.branches, "two or more row counts and two or more step counts"),
    "d": (lambda w, n: w.source_tokens, "source images of two or more sizes, or of one size and none"),
    "e": (lambda w, n: w.source_tokens**2, "source images of two or more sizes"),
    "f": (lambda w, n: 1.0, "two or more step counts"),
}
_SOURCE_TERMS = ("d", "e")
# Columns are scaled to unit length; below this share of the largest singular value a direction was not
# measured.
_RANK_TOLERANCE = 1e-7


def fit_cost(
    sweep: Sequence[Measurement], *, held_out: Sequence[Measurement] = (), source_images: bool = False
) -> FitReport:
    """Least squares of the relative error, so that small canvases count as much as large ones.

    `source_images` says that the model takes them: their terms must then be in the sweep; otherwise they are
    left out when the sweep has none. Raises ValueError when the sweep cannot identify a term, naming the
    terms and what is missing, or when a measured time is not positive.
    """
    everything = (*sweep, *held_out)
    bad = [point for point in everything if not (point.seconds > 0 and np.isfinite(point.seconds))]
    if bad:
        raise ValueError(f"measured seconds must be positive and finite: {bad[0]}")
    has_sources = any(point.workload.source_tokens for point in everything)
    names = [name for name in _TERMS if name not in _SOURCE_TERMS or has_sources or source_images]
    seconds = np.array([point.seconds for point in sweep])
    weighted = _design(sweep, names) / seconds[:, None]
    _refuse_unidentified(weighted, names)
    coefficients, zeroed = _non_negative(weighted, np.ones(len(sweep)), names)
    model = CostModel(**dict(zip(names, coefficients.tolist(), strict=True)))

    predicted = _design(sweep, names) @ coefficients
    errors = np.abs(predicted - seconds) / seconds
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    residual = float(np.sum((seconds - predicted) ** 2))
    worst = int(errors.argmax())
    return FitReport(
        model=model,
        r_squared=1.0 - residual / spread if spread else 1.0,
        worst_error=float(errors[worst]),
        worst_measurement=sweep[worst],
        zeroed=zeroed,
        held_out_error=_held_out_error(model, held_out),
        token_count_error=_token_count_error(sweep, held_out),
    )


def _design(points: Sequence[Measurement], names: Sequence[str]) -> np.ndarray:
    return np.array(
        [[float(_TERMS[name][0](point.workload, point.num_rows)) for name in names] for point in points]
    ).reshape(len(points), len(names))


def _refuse_unidentified(matrix: np.ndarray, names: Sequence[str]) -> None:
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1.0)
    # Padding with zero rows gives a full set of right singular vectors when there are fewer points than
    # terms.
    square = np.vstack([scaled, np.zeros((max(0, len(names) - len(matrix)), len(names)))])
    _, singular, directions = np.linalg.svd(square)
    free = directions[singular <= _RANK_TOLERANCE * max(singular.max(), 1e-300)]
    unidentified = [name for index, name in enumerate(names) if np.any(np.abs(free[:, index]) > 1e-6)]
    if unidentified:
        needed = "; ".join(f"{name} needs {_TERMS[name][1]}" for name in unidentified)
        raise ValueError(
            f"the sweep of {len(matrix)} points cannot identify {', '.join(unidentified)} of the cost model: {needed}"
        )


def _non_negative(
    matrix: np.ndarray, target: np.ndarray, names: Sequence[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Least squares with no negative coefficient: the best of at most 2^7 subsets of terms, so exact."""
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / lengths
    full = np.linalg.lstsq(scaled, target, rcond=None)[0]
    # Rounding may leave a true zero just below it.
    if np.all(full >= -1e-9 * np.abs(full).max()):
        return np.maximum(full, 0.0) / lengths, ()
    best, best_loss = np.zeros(len(names)), float(target @ target)
    for size in range(1, len(names)):
        for kept in itertools.combinations(range(len(names)), size):
            part = np.linalg.lstsq(scaled[:, kept], target, rcond=None)[0]
            loss = float(np.sum((scaled[:, kept] @ part - target) ** 2))
            if np.all(part >= 0) and loss < best_loss:
                best, best_loss = np.zeros(len(names)), loss
                best[list(kept)] = part
    return best / lengths, tuple(name for name, value in zip(names, best, strict=True) if value == 0)


def _held_out_error(model: CostModel, held_out: Sequence[Measurement]) -> float | None:
    if not held_out:
        return None
    return float(
        np.mean([abs(model.predict(p.workload, p.num_rows) - p.seconds) / p.seconds for p in held_out])
    )


def _token_count_error(sweep: Sequence[Measurement], held_out: Sequence[Measurement]) -> float | None:
    if not held_out:
        return None
    count = np.array([_TERMS["a"][0](p.workload, p.num_rows) / p.seconds for p in sweep])
    seconds_a_token = float(count.sum() / (count @ count))
    predicted = [seconds_a_token * _TERMS["a"][0](p.workload, p.num_rows) for p in held_out]
    return float(np.mean([abs(t - p.seconds) / p.seconds for t, p in zip(predicted, held_out, strict=True)]))
