# SPDX-License-Identifier: Apache-2.0
"""Which rank replays which rows, in which update and in which micro-batch. Pure: ids, canvases and costs in,
indices out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class RankUpdate:
    """One update as one rank sees it.

    Attributes:
        micros: row indices of each micro-batch; an empty one is padding, so that every rank has equally many.
        weight_sum: the sum of row weights of the whole update, over all ranks: the denominator of its loss.
    """

    micros: tuple[tuple[int, ...], ...]
    weight_sum: float


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan.

    Attributes:
        rows: the batch's rows that the rank needs. Send it `part.select(rows)`; the micros index into that.
        updates: in order.
    """

    rank: int
    world_size: int
    rows: tuple[int, ...]
    updates: tuple[RankUpdate, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training step's plan: `micros[update][rank][micro]` holds indices into the batch; `weight_sums` one
    number an update.
    """

    micros: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    weight_sums: tuple[float, ...]
    world_size: int

    def for_rank(self, rank: int) -> RankPlan:
        """The rank's rows, and its micros in terms of those."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} was asked for; the plan is for ranks 0 to {self.world_size - 1}")
        rows = tuple(row for update in self.micros for micro in update[rank] for row in micro)
        place = {row: i for i, row in enumerate(rows)}
        updates = tuple(
            RankUpdate(tuple(tuple(place[row] for row in micro) for micro in update[rank]), weight_sum)
            for update, weight_sum in zip(self.micros, self.weight_sums, strict=True)
        )
        return RankPlan(rank, self.world_size, rows, updates)


def plan_updates(
    group_ids: Sequence[str],
    canvases: Sequence[Hashable],
    costs: Sequence[float],
    world_size: int,
    num_updates: int,
    micro_batch_size: int,
    *,
    weights: Sequence[float] | None = None,
) -> Plan:
    """Cuts a batch into disjoint updates by whole groups, each update into equal shares of cost, each share
    into micros.

    Groups go to updates in their order of first appearance, equally many each (the first updates take one
    more where it does not divide). Within an update rows are dealt longest first to the rank with the least
    cost so far; rows of equal cost and canvas are interchangeable, so they are then handed out in order,
    which keeps siblings together without changing any rank's cost. A micro holds one canvas and at most
    `micro_batch_size` rows; the micros of a canvas are equal to within one row. All is deterministic.

    Rows of weight 0 are in no micro at all, so that nothing about them can matter; groups without a live row
    count for no update.

    Args:
        group_ids, canvases, costs: one a row; costs > 0 in any unit.
        weights: one a row, all 1 when None.

    Raises:
        ValueError: fewer rows than ranks, fewer groups than updates, or a cost, weight or size out of range.
    """
    num_rows = len(group_ids)
    weights = [1.0] * num_rows if weights is None else [float(w) for w in weights]
    _check(num_rows, len(set(group_ids)), canvases, costs, weights, world_size, num_updates, micro_batch_size)
    live = [row for row in range(num_rows) if weights[row] > 0]
    groups = list(dict.fromkeys(group_ids[row] for row in live))
    members: dict[str, list[int]] = {group: [] for group in groups}
    for row in live:
        members[group_ids[row]].append(row)
    updates = []
    for chunk in _chunks(groups, num_updates):
        rows = [row for group in chunk for row in members[group]]
        shares = _deal(rows, canvases, costs, world_size)
        micros = [_micros(share, canvases, micro_batch_size) for share in shares]
        most = max((len(m) for m in micros), default=0)
        updates.append(tuple((*m, *[()] * (most - len(m))) for m in micros))
    sums = tuple(
        sum(weights[row] for micros in update for micro in micros for row in micro) for update in updates
    )
    return Plan(tuple(updates), sums, world_size)


def _check(
    num_rows: int,
    num_groups: int,
    canvases: Sequence[Hashable],
    costs: Sequence[float],
    weights: Sequence[float],
    world_size: int,
    num_updates: int,
    micro_batch_size: int,
) -> None:
    if not num_rows == len(canvases) == len(costs) == len(weights):
        raise ValueError(
            f"plan_updates: one group id, canvas, cost and weight a row; got {num_rows}, {len(canvases)}, "
            f"{len(costs)}, {len(weights)}"
        )
    for name, value in (
        ("world_size", world_size),
        ("stack.num_updates_per_batch", num_updates),
        ("stack.micro_batch_size", micro_batch_size),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; allowed: 1 or more")
    if num_groups < num_updates:
        raise ValueError(
            f"stack.num_updates_per_batch is {num_updates}, but the batch has {num_groups} groups; lower it or raise batch_size"
        )
    if num_rows < world_size * num_updates:
        raise ValueError(
            f"{num_rows} rows in {num_updates} updates for {world_size} training ranks: an update would have fewer rows than "
            "ranks; raise batch_size or samples_per_prompt, or lower stack.num_updates_per_batch or the number of devices"
        )
    for row, cost in enumerate(costs):
        if not 0 < cost < math.inf:
            raise ValueError(f"plan_updates: row {row} has cost {cost}; allowed: finite and above 0")
    for row, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise ValueError(f"plan_updates: row {row} has weight {weight}; allowed: finite, 0 or more")


def _chunks(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` contiguous pieces whose lengths differ by at most one, the longer ones first."""
    size, more = divmod(len(items), count)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(count)]
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _deal(
    rows: Sequence[int], canvases: Sequence[Hashable], costs: Sequence[float], world_size: int
) -> list[list[int]]:
    """Each rank's rows, balanced by cost (Graham's longest-first list scheduling)."""
    load = [0.0] * world_size
    counts: list[dict[tuple[float, Hashable], int]] = [{} for _ in range(world_size)]
    order = list(dict.fromkeys(canvases[row] for row in rows))
    # Siblings of one canvas and cost are alike; the canvas joins the key so that equal costs do not mix canvases.
    kinds = sorted(rows, key=lambda row: (-costs[row], order.index(canvases[row])))
    for row in kinds:
        rank = min(range(world_size), key=lambda r: (load[r], r))
        load[rank] += costs[row]
        kind = (costs[row], canvases[row])
        counts[rank][kind] = counts[rank].get(kind, 0) + 1
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for kind in dict.fromkeys((costs[row], canvases[row]) for row in kinds):
        same = [row for row in rows if (costs[row], canvases[row]) == kind]
        start = 0
        for rank in range(world_size):
            end = start + counts[rank].get(kind, 0)
            shares[rank] += same[start:end]
            start = end
    return shares


def _micros(
    share: Sequence[int], canvases: Sequence[Hashable], micro_batch_size: int
) -> list[tuple[int, ...]]:
    micros: list[tuple[int, ...]] = []
    for canvas in dict.fromkeys(canvases[row] for row in share):
        rows = [row for row in share if canvases[row] == canvas]
        count = -(-len(rows) // micro_batch_size)
        micros += [tuple(chunk) for chunk in _chunks(rows, count)]
    return micros
