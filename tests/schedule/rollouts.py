# SPDX-License-Identifier: Apache-2.0
"""Rollouts for the scheduling tests: the 512 / 768 / 1024 mix, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from unirl.schedule.coordinator import AdaptivePacking, FullPacking
from unirl.schedule.cost import TokenCount
from unirl.schedule.policies import POLICIES
from unirl.schedule.units import Group, UnitTable, Workload, build_unit_table

# 23 groups at 512 x 512, 5 at 768 x 768 and 4 at 1024 x 1024, a token being 16 x 16 pixels.
MIX_TOKENS = [1024] * 23 + [2304] * 5 + [4096] * 4


class GivenCost:
    """Cost per row equal to the workload's tokens, and a fixed cost a call."""

    def __init__(self, per_call: float = 0.0) -> None:
        self.per_call = per_call

    def affine(self, workload: Workload) -> tuple[float, float]:
        return float(workload.tokens), self.per_call


def groups_of(tokens: Sequence[int], owners: Sequence[int], num_rows: Sequence[int]) -> list[Group]:
    return [
        Group(f"g{index}", tuple(f"g{index}/{row}" for row in range(rows)), Workload(count), owner)
        for index, (count, owner, rows) in enumerate(zip(tokens, owners, num_rows, strict=True))
    ]


def random_placement(seed: int, *, rows_a_group: int = 16, num_ranks: int = 8) -> list[Group]:
    """The mix's 32 groups dealt out at random, equally many a rank."""
    tokens = MIX_TOKENS.copy()
    random.Random(seed).shuffle(tokens)
    owners = [index * num_ranks // len(tokens) for index in range(len(tokens))]
    return groups_of(tokens, owners, [rows_a_group] * len(tokens))


@st.composite
def tables(draw: st.DrawFn, max_groups: int = 8, max_ranks: int = 5) -> tuple[UnitTable, int]:
    """(unit table, number of ranks), of units that may be atoms for packing or calls of their own."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_groups = draw(st.integers(1, max_groups))
    lists = [
        draw(st.lists(values, min_size=num_groups, max_size=num_groups))
        for values in (
            st.sampled_from([1, 4, 9, 16]),
            st.integers(0, num_ranks - 1),
            st.integers(1, 9),
        )
    ]
    max_rows = draw(st.integers(1, 6))
    min_rows = draw(st.none() | st.integers(1, max_rows))
    cost = draw(st.sampled_from([TokenCount(), GivenCost(0.0), GivenCost(3.0)]))
    return build_unit_table(groups_of(*lists), cost, max_rows=max_rows, min_rows=min_rows), num_ranks


policies = st.sampled_from(sorted(POLICIES)).map(lambda name: POLICIES[name]())

Packing = AdaptivePacking | FullPacking | None
PACKINGS: list[Packing] = [
    None,
    AdaptivePacking(6),
    AdaptivePacking(6, across_groups=True),
    FullPacking(6),
    FullPacking(6, across_groups=False),
]
