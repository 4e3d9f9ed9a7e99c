# SPDX-License-Identifier: Apache-2.0
"""Numbers of many micro-batches, updates and ranks as one number a rollout, without losing the worst one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


class Aggregate:
    """Row-weighted means with their maxima, plain maxima, and totals.

    `mean` weighs each value by the rows that it stands for, so a micro of 1 row counts a third of one of 3,
    and keeps the maximum as `<name>_max`: clip fractions 0 and .4 of 3 and 1 rows give `clip` .1 and
    `clip_max` .4, where a mean of means would say .2 and hide the .4. With `update`, the update's own mean is
    kept as `<name>/update_<u>` as well.

    Values that stand for 0 rows (padding micros) count nowhere. A NaN among values with rows stays NaN:
    nothing is hidden. The state is a plain mapping, so that ranks can send it and the driver can `merge` it.
    """

    def __init__(self) -> None:
        self._weighted: dict[str, float] = {}
        self._rows: dict[str, float] = {}
        self._maxima: dict[str, float] = {}
        self._totals: dict[str, float] = {}

    def mean(self, values: Mapping[str, float], rows: float, *, update: int | None = None) -> None:
        """Adds values that are means over `rows` rows.

        `rows` may be any weight of at least 0; a negative one raises `ValueError`.
        """
        if not rows >= 0:
            raise ValueError(f"rows is {rows}; allowed: 0 or more")
        for name, value in values.items():
            self._add_mean(name, float(value), rows)
            if rows:
                self._raise_maximum(f"{name}_max", float(value))
            if update is not None:
                self._add_mean(f"{name}/update_{update}", float(value), rows)

    def maximum(self, values: Mapping[str, float]) -> None:
        """Keeps the largest value under the name itself (names of maxima end in `_max` by convention)."""
        for name, value in values.items():
            self._raise_maximum(name, float(value))

    def total(self, values: Mapping[str, float]) -> None:
        """Adds up counts (dropped rows, skipped steps, seconds of disjoint phases)."""
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0.0) + float(value)

    def state(self) -> dict[str, dict[str, float]]:
        """What `merge` takes."""
        return {
            "weighted": dict(self._weighted),
            "rows": dict(self._rows),
            "maxima": dict(self._maxima),
            "totals": dict(self._totals),
        }

    def merge(self, states: Iterable[Mapping[str, Mapping[str, float]]]) -> Aggregate:
        """Adds the states of other ranks to this one, and returns this one."""
        for state in states:
            for name, value in state["weighted"].items():
                self._weighted[name] = self._weighted.get(name, 0.0) + value
                self._rows[name] = self._rows.get(name, 0.0) + state["rows"][name]
            self.maximum(state["maxima"])
            self.total(state["totals"])
        return self

    def result(self) -> dict[str, float]:
        """The flat metrics. A mean that no row stands for is NaN (logged as `null`), not 0."""
        means = {
            name: weighted / self._rows[name] if self._rows[name] else math.nan
            for name, weighted in self._weighted.items()
        }
        return {**means, **self._maxima, **self._totals}

    def _add_mean(self, name: str, value: float, rows: float) -> None:
        self._weighted.setdefault(name, 0.0)
        self._rows.setdefault(name, 0.0)
        if rows:
            self._weighted[name] += value * rows
            self._rows[name] += rows

    def _raise_maximum(self, name: str, value: float) -> None:
        known = self._maxima.get(name, -math.inf)
        self._maxima[name] = value if math.isnan(value) or value > known else known
