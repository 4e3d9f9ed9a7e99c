# SPDX-License-Identifier: Apache-2.0
"""`Part`: the rows of one depth. `Sample`: the depths of a request, from prompts to what was generated from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from unirl.types.advantages import group_advantages
from unirl.types.canvas import Canvas
from unirl.types.columns import Columns, row, shared
from unirl.types.layout import LayoutRecord
from unirl.types.sampling import SamplingParams, group_of


@dataclasses.dataclass(frozen=True)
class Part(Columns):
    """Columns of N rows. Grouping is by id: the parent path of a row's id is its group.

    Attributes:
        ids: lineage paths, unique in the run: `r12.p7` (rollout, prompt), `r12.p7/3` (sibling).
        prompts: one text a row.
        metadata: the dataset row's metadata, `{"canvas": [H, W]}` among it.
        images: source image of a row (uint8 `[H, W, 3]` or `[H, W, 1]`) or None.
        sde_steps: int64 `[N, S]`, the trained steps; the same for all siblings of a group.
        segment: `LatentSegment`, or a `SegmentRef` to one that lies in a store.
        media: decoded images, float32 `[H, W, C]` in [0, 1].
        rewards: float64 `[N]`. component_rewards: the parts they were combined from.
        advantages: float64 `[N]`.
        weights: float64 `[N]`; 0 keeps a row in place but out of statistics, loss and metrics.
        push_version: int64 `[N]`, pushes the generating engine had received.
        policy_step: int64 `[N]`, optimizer steps inside the generating weights.
        fingerprints: int64 `[N, 2]`, digest of what the transformer was really given.
        layouts: what the digests were taken of, where the engine sends it: a mismatch is then told field by field.
        params: how the rows were sampled (one for the whole table).
    """

    ids: tuple[str, ...] = row()
    prompts: tuple[str, ...] = row()
    metadata: tuple[Mapping[str, Any], ...] = row()
    images: tuple[np.ndarray | None, ...] | None = row(None)
    sde_steps: torch.Tensor | None = row(None)
    segment: Any = row(None)
    media: tuple[np.ndarray, ...] | None = row(None)
    rewards: torch.Tensor | None = row(None)
    component_rewards: Mapping[str, torch.Tensor] | None = row(None)
    advantages: torch.Tensor | None = row(None)
    weights: torch.Tensor | None = row(None)
    push_version: torch.Tensor | None = row(None)
    policy_step: torch.Tensor | None = row(None)
    fingerprints: torch.Tensor | None = row(None)
    layouts: tuple[LayoutRecord, ...] | None = row(None)
    params: SamplingParams | None = shared(None)

    @property
    def group_ids(self) -> list[str]:
        """The parent path of every row."""
        return [group_of(i) for i in self.ids]

    def canvases(self) -> list[Canvas]:
        """`metadata["canvas"]` of every row, else the default of `params`."""
        if self.params is None:
            raise ValueError("canvases need sampling params for the default canvas; this Part has none")
        default = self.params.canvas
        return [
            Canvas.parse(m["canvas"], f"row {i!r}") if m.get("canvas") is not None else default
            for i, m in zip(self.ids, self.metadata, strict=True)
        ]

    def live_weights(self) -> torch.Tensor:
        """float64 `[N]`: the weights, all one when none were set."""
        return torch.ones(len(self), dtype=torch.float64) if self.weights is None else self.weights

    def compute_advantages(
        self,
        *,
        scope: Literal["group", "batch"] = "group",
        use_global_std: bool = False,
    ) -> Part:
        """(r - mean) / (population std + 1e-8) in float64, by group id; see `group_advantages`."""
        if self.rewards is None:
            raise ValueError("compute_advantages: the rows have no rewards yet; score them first")
        advantages = group_advantages(
            self.rewards, self.group_ids, self.live_weights(), scope=scope, use_global_std=use_global_std
        )
        return self.replace(advantages=advantages)

    def fork(self, siblings: int, params: SamplingParams) -> Part:
        """`siblings` children a row, contiguous, named `parent/j`; they carry prompt, metadata and source image."""
        if siblings < 1:
            raise ValueError(
                f"fork: asked for {siblings} siblings; allowed: 1 or more (key samples_per_prompt)"
            )
        index = [i for i in range(len(self)) for _ in range(siblings)]
        children = self.select(index)
        ids = tuple(f"{self.ids[i]}/{j}" for i in range(len(self)) for j in range(siblings))
        return children.replace(ids=ids, params=params)


@dataclasses.dataclass(frozen=True)
class Sample:
    """Parts by depth: prompts first, the rows generated from them last. Every row's parent stands one depth above it."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("Sample: at least one Part is needed")
        for depth, part in enumerate(self.parts):
            if len(set(part.ids)) != len(part.ids):
                raise ValueError(f"Sample: row ids at depth {depth} are not unique: {list(part.ids)}")
            if depth:
                orphans = sorted(set(part.group_ids) - set(self.parts[depth - 1].ids))
                if orphans:
                    raise ValueError(f"Sample: rows at depth {depth} have no parent above them: {orphans}")

    @property
    def frontier(self) -> Part:
        """The deepest rows."""
        return self.parts[-1]

    def replace_frontier(self, part: Part) -> Sample:
        """The same tree with another deepest Part."""
        return Sample((*self.parts[:-1], part))

    def fork(self, siblings: int, params: SamplingParams) -> Sample:
        """A new depth of `siblings` children a frontier row."""
        return Sample((*self.parts, self.frontier.fork(siblings, params)))

    def canvases(self) -> list[Canvas]:
        """One (height, width) a frontier row."""
        return self.frontier.canvases()

    @property
    def group_id(self) -> str:
        """Id of the only root; defined for a Sample of one tree."""
        if len(self.parts[0]) != 1:
            raise ValueError(f"group_id of a Sample with {len(self.parts[0])} roots; split() it first")
        return self.parts[0].ids[0]

    def split(self) -> list[Sample]:
        """One tree-complete Sample a root, in root order."""
        trees = []
        for root in range(len(self.parts[0])):
            parts = [self.parts[0].select([root])]
            for below in self.parts[1:]:
                above = set(parts[-1].ids)
                parts.append(below.select([i for i, g in enumerate(below.group_ids) if g in above]))
            trees.append(Sample(tuple(parts)))
        return trees

    @staticmethod
    def concat(samples: Sequence[Sample]) -> Sample:
        """Depth by depth; SHARED values must agree."""
        depths = {len(s.parts) for s in samples}
        if len(depths) != 1:
            raise ValueError(f"Sample.concat: samples of different depths {sorted(depths)}")
        return Sample(tuple(Part.concat([s.parts[d] for s in samples]) for d in range(depths.pop())))

    def __len__(self) -> int:
        return len(self.parts[0])
