# SPDX-License-Identifier: Apache-2.0
"""What a unit costs: token count, or a model fitted to measurements, corrected by what ranks really take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from unirl.schedule.units import Cost, Workload


@dataclass(frozen=True)
class TokenCount:
    """The cost without coefficients: image tokens times forward passes, and nothing a call."""

    def affine(self, workload: Workload) -> tuple[float, float]:
        return float(workload.tokens * workload.steps * workload.branches), 0.0


@dataclass(frozen=True)
class CostModel:
    """Seconds of one call of the engine that packs n rows of one group.

    ::

        t = steps * branches * (n * (a * L + b * L**2 + g * L * P) + c) + (d * Ls + e * Ls**2) + f

    with L image tokens, P prefix tokens and Ls source-image tokens; a pays for the linear layers, b and g for
    the attention to the image and to the prefix, c for a forward pass whatever its size, d and e for encoding
    source images, f for the call. `d` and `e` are None when they were never measured; rows with source images
    are then refused.
    """

    a: float = 0.0
    b: float = 0.0
    g: float = 0.0
    c: float = 0.0
    d: float | None = None
    e: float | None = None
    f: float = 0.0

    def __post_init__(self) -> None:
        negative = [name for name, value in asdict(self).items() if value is not None and value < 0]
        if negative:
            raise ValueError(f"reward_stack.cost: {', '.join(negative)} must not be negative")

    def affine(self, workload: Workload) -> tuple[float, float]:
        if workload.source_tokens and (self.d is None or self.e is None):
            raise ValueError(
                f"a row has a source image of {workload.source_tokens} tokens, and reward_stack.cost has no d and e: "
                "the sweep it was fitted to had no source images; measure one that has"
            )
        passes = workload.steps * workload.branches
        tokens, source = workload.tokens, workload.source_tokens
        per_row = passes * tokens * (self.a + self.b * tokens + self.g * workload.prefix_tokens)
        encode = (self.d or 0.0) * source + (self.e or 0.0) * source**2
        return per_row, passes * self.c + encode + self.f

    def predict(self, workload: Workload, num_rows: int) -> float:
        """Seconds of one call with `num_rows` rows."""
        per_row, per_call = self.affine(workload)
        return num_rows * per_row + per_call

    def to_config(self) -> dict[str, float]:
        """The coefficients for `reward_stack.cost`, without those that were not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, float]) -> CostModel:
        """From `reward_stack.cost`; coefficients that are left out are 0, or unmeasured for d and e."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise ValueError(
                f"reward_stack.cost has unknown coefficients {unknown}; allowed are {', '.join(known)}"
            )
        return cls(**{name: float(value) for name, value in config.items()})


class RankCorrection:
    """How much slower each rank is than the others, from measured over predicted cost.

    Sums over the past with weight `decay` an assignment, so that a rank that slows down is noticed. It lives
    as long as the run does; the cost model's unit cancels, so it corrects token counts as well as seconds.
    """

    def __init__(self, num_ranks: int, *, decay: float = 0.9) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"decay is {decay}; it must lie between 0 and 1")
        self._decay = decay
        # One entry a rank, and at the end their sum.
        self._predicted = [0.0] * (num_ranks + 1)
        self._measured = [0.0] * (num_ranks + 1)

    def update(self, rank: int, *, predicted: float, measured: float) -> None:
        """Takes one finished assignment."""
        self._add(self._predicted, rank, predicted)
        self._add(self._measured, rank, measured)

    def ratio(self, rank: int) -> float | None:
        """Measured over predicted cost; None before the first measurement."""
        return self._measured[rank] / self._predicted[rank] if self._predicted[rank] > 0 else None

    def factor(self, rank: int) -> float:
        """The rank's ratio over that of all ranks together: 2 is twice as slow. 1 before any measurement."""
        ratio = self.ratio(rank)
        return (
            1.0
            if ratio is None or self._measured[-1] <= 0
            else ratio * self._predicted[-1] / self._measured[-1]
        )

    def _add(self, sums: list[float], rank: int, value: float) -> None:
        change = value - (1.0 - self._decay) * sums[rank]
        sums[rank] += change
        sums[-1] += change


def cost_from_config(value: Mapping[str, float] | str | None) -> Cost:
    """What `reward_stack.cost` asks for: coefficients, a JSON file with a table `coefficients`, or, unset, token count."""
    if value is None:
        return TokenCount()
    if not isinstance(value, str):
        return CostModel.from_config(value)
    try:
        held = json.loads(Path(value).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"reward_stack.cost names the file {value}, which cannot be read: {error}"
        ) from error
    if not isinstance(held, dict) or not isinstance(held.get("coefficients"), dict):
        raise ValueError(
            f"reward_stack.cost names the file {value}, which does not hold a table of coefficients; write it with unirl fit-cost"
        )
    return CostModel.from_config(held["coefficients"])
