# SPDX-License-Identifier: Apache-2.0
"""A rollout's plan: the little that has to travel so that every rank derives the same units and rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from unirl.schedule.coordinator import AdaptivePacking, Coordinator, FullPacking
from unirl.schedule.cost import CostModel, RankCorrection
from unirl.schedule.policies import POLICIES, StealPolicy
from unirl.schedule.units import Cost, Group, UnitTable, build_unit_table, contiguous_owners


@dataclass(frozen=True)
class RolloutPlan:
    """Groups with their owners, and how they are cut and handed out.

    `max_rows` rows is the most that a call of the engine packs, `min_rows` the fewest, `packs_groups` whether of several groups.
    Units are as large as packing wants unless there is both somebody to take them elsewhere (`steal`) and a measured
    cost of a call to weigh against the tail: then they are atoms of `min_rows`. A call runs one unit or several: as many as fit
    where nobody steals, else as `AdaptivePacking` says, many first and few at the end.
    """

    groups: tuple[Group, ...]
    num_ranks: int
    schedule: str
    cost: Cost
    max_rows: int
    min_rows: int = 1
    packs_groups: bool = False

    @property
    def is_adaptive(self) -> bool:
        return self.schedule == StealPolicy.name and isinstance(self.cost, CostModel)

    @property
    def needs_coordinator(self) -> bool:
        """Whether what a rank runs depends on the others, so that all have to ask one coordinator."""
        return self.schedule == StealPolicy.name

    def unit_table(self) -> UnitTable:
        """The units; equal on every rank."""
        atoms = self.min_rows if self.is_adaptive else None
        return build_unit_table(self.groups, self.cost, max_rows=self.max_rows, min_rows=atoms)

    def coordinator(self, correction: RankCorrection | None = None) -> Coordinator:
        """Hands the units out; one for all ranks together, or, without stealing, an equal one on each rank."""
        packing: AdaptivePacking | FullPacking | None = None
        if self.schedule == StealPolicy.name and (self.is_adaptive or self.packs_groups):
            packing = AdaptivePacking(self.max_rows, across_groups=self.packs_groups)
        elif self.packs_groups:
            packing = FullPacking(self.max_rows)
        policy = POLICIES[self.schedule]()
        return Coordinator(self.unit_table(), self.num_ranks, policy, packing=packing, correction=correction)

    def restricted(self, row_ids: Collection[str], num_ranks: int) -> RolloutPlan:
        """The same for some of the rows alone, on other ranks: groups keep their order and are dealt out anew."""
        wanted = set(row_ids)
        kept = [
            (group, rows)
            for group in self.groups
            if (rows := tuple(row_id for row_id in group.row_ids if row_id in wanted))
        ]
        owners = contiguous_owners(len(kept), num_ranks)
        groups = tuple(
            replace(group, row_ids=rows, owner=owner)
            for (group, rows), owner in zip(kept, owners, strict=True)
        )
        return replace(self, groups=groups, num_ranks=num_ranks)
