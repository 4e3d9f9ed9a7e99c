# SPDX-License-Identifier: Apache-2.0
"""The unit table: what a rollout has to generate, cut into pieces that any rank can run.

Every rank derives the same table from the same groups, so a unit is known by its number alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Workload:
    """What one row of a group costs to generate, in the terms of the cost model; all are counts.

    `tokens` are image tokens, `prefix_tokens` the context they attend to, `source_tokens` those of source
    images that are encoded once a call, `branches` the forward passes of a guided step (1 without guidance).
    """

    tokens: int
    steps: int = 1
    branches: int = 1
    prefix_tokens: int = 0
    source_tokens: int = 0


class Cost(Protocol):
    """Predicts the cost of n rows of one group in one call: `per_row * n + per_call`."""

    def affine(self, workload: Workload) -> tuple[float, float]:
        """(per_row, per_call), both at least 0."""


@dataclass(frozen=True)
class Group:
    """The siblings of one prompt, which share a canvas and so cost the same; `owner` is their rank."""

    group_id: str
    row_ids: tuple[str, ...]
    workload: Workload
    owner: int


class Unit(NamedTuple):
    """Consecutive rows of one group: `row_ids[start:stop]` of `groups[group]`.

    `cost` is what the unit adds to a queue, in the cost model's unit (seconds when it was fitted, else token
    steps): that of its call, or, for an atom that will be packed with others, its share of a full one.
    """

    unit_id: int
    group: int
    start: int
    stop: int
    owner: int
    cost: float

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class UnitTable:
    """The groups of a rollout and their units; unit `i` is `units[i]`, groups in order, rows in order.

    `per_row` and `per_call` are one entry a group: n of its rows in one call cost `per_row * n + per_call`.
    """

    groups: tuple[Group, ...]
    units: tuple[Unit, ...]
    per_row: tuple[float, ...]
    per_call: tuple[float, ...]

    @cached_property
    def row_ids(self) -> tuple[str, ...]:
        """Every row of the rollout, in the order in which results are returned to their owners."""
        return tuple(row_id for group in self.groups for row_id in group.row_ids)

    @cached_property
    def total_cost(self) -> float:
        """Cost of everything with each group in one call: the least work there is."""
        return sum(
            len(group.row_ids) * per_row + per_call
            for group, per_row, per_call in zip(self.groups, self.per_row, self.per_call, strict=True)
        )

    @cached_property
    def digest(self) -> str:
        """128 bits, in hex, that are equal on two ranks exactly when they derived the same units."""
        plain = [[group.group_id, group.row_ids, group.owner] for group in self.groups]
        text = json.dumps([plain, [tuple(unit) for unit in self.units]], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def rows_of(self, unit_ids: Sequence[int]) -> tuple[str, ...]:
        """Row ids of the units, in the order given."""
        units = (self.units[unit_id] for unit_id in unit_ids)
        return tuple(
            row_id for unit in units for row_id in self.groups[unit.group].row_ids[unit.start : unit.stop]
        )

    def cost_of(self, unit_ids: Sequence[int]) -> float:
        """Cost of running units in one call: their rows, and what the dearest call of any of their groups costs."""
        if len(unit_ids) == 1:  # the usual case, and a pull is on the way of every rank
            unit = self.units[unit_ids[0]]
            return unit.num_rows * self.per_row[unit.group] + self.per_call[unit.group]
        units = [self.units[unit_id] for unit_id in unit_ids]
        rows = sum(unit.num_rows * self.per_row[unit.group] for unit in units)
        return rows + max(self.per_call[unit.group] for unit in units)

    def shape(self, group: int) -> tuple[int, int, int]:
        """What groups must have in common to share a batch: image tokens, steps, branches."""
        workload = self.groups[group].workload
        return workload.tokens, workload.steps, workload.branches


def build_unit_table(
    groups: Sequence[Group], cost: Cost, *, max_rows: int, min_rows: int | None = None
) -> UnitTable:
    """Cuts every group into consecutive units.

    With `max_rows` alone, a group becomes as few units as have at most `max_rows` rows each: what an engine
    packs into one call. With `min_rows` as well, it becomes as many as have at least `min_rows`, but no more
    than `max_rows`, rows each: the atoms that `AdaptivePacking` puts together. Sizes within a group differ by
    at most one, larger first.
    """
    if max_rows < 1:
        raise ValueError(f"micro_batch_size is {max_rows}; it must be at least 1")
    if min_rows is not None and not 1 <= min_rows <= max_rows:
        raise ValueError(
            f"the engine packs at least {min_rows} rows, and reward_stack.micro_batch_size is {max_rows}; "
            f"raise it to {min_rows} or more"
        )
    if len({group.group_id for group in groups}) != len(groups):
        raise ValueError("two groups of a rollout have the same id")
    units: list[Unit] = []
    affine = [cost.affine(group.workload) for group in groups]
    for index, (group, (per_row, per_call)) in enumerate(zip(groups, affine, strict=True)):
        num_rows = len(group.row_ids)
        num_calls = -(-num_rows // max_rows)
        num_units = num_calls if min_rows is None else max(num_calls, num_rows // min_rows)
        for start, stop in _even_cuts(num_rows, num_units):
            calls = 1.0 if min_rows is None else num_calls * (stop - start) / num_rows
            cost_of_unit = (stop - start) * per_row + calls * per_call
            units.append(Unit(len(units), index, start, stop, group.owner, cost_of_unit))
    return UnitTable(
        tuple(groups),
        tuple(units),
        tuple(per_row for per_row, _ in affine),
        tuple(call for _, call in affine),
    )


def contiguous_owners(num_groups: int, num_ranks: int) -> list[int]:
    """The owner of each group when groups are dealt out contiguously, in shares that differ by at most one."""
    return [
        rank
        for rank, (start, stop) in enumerate(_even_cuts(num_groups, num_ranks))
        for _ in range(start, stop)
    ]


def _even_cuts(num_items: int, num_parts: int) -> list[tuple[int, int]]:
    """[start, stop) of `num_parts` consecutive parts whose sizes differ by at most one, larger first."""
    if num_parts == 0:
        return []
    size, extra = divmod(num_items, num_parts)
    bounds = [part * size + min(part, extra) for part in range(num_parts + 1)]
    return list(pairwise(bounds))
