# SPDX-License-Identifier: Apache-2.0
"""Which steps of a trajectory are stochastic and trained.

A set is a function of (seed, group id, iteration), so siblings share it however they are split over ranks and micro-batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from unirl.types.sampling import Rule, group_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSet:
    """Chooses the trained steps.

    Args:
        kind: `all`; `random`: `num_sde_steps` drawn from the part `fraction` of the schedule (Flow-GRPO-Fast);
            `window`: `num_sde_steps` consecutive ones, drawn at random; `progressive`: a window that moves with the
            iteration (MixGRPO).
        fraction: part of the schedule to draw from, as [from, to] in [0, 1].
        num_sde_steps: how many (ignored by `all`).
        iterations_per_shift: iterations before a `progressive` window moves on by one.
    """

    kind: Literal["all", "random", "window", "progressive"] = "all"
    fraction: tuple[float, float] = (0.0, 1.0)
    num_sde_steps: int | None = None
    iterations_per_shift: int = 1

    def candidates(self, num_inference_steps: int, rule: Rule) -> list[int]:
        """Steps that may be trained. CPS's last one has no density."""
        low, high = self.fraction
        if not 0 <= low < high <= 1:
            raise ValueError(
                f"sampling.sde.fraction is {list(self.fraction)}; allowed: [from, to] with 0 <= from < to <= 1"
            )
        steps = range(round(low * num_inference_steps), round(high * num_inference_steps))
        return [s for s in steps if not (rule == "cps" and s == num_inference_steps - 1)]

    def check(self, num_inference_steps: int, rule: Rule) -> int:
        """Number of trained steps a row; raises when the set cannot be drawn."""
        if self.kind not in ("all", "random", "window", "progressive"):
            raise ValueError(f"sampling.sde.kind is {self.kind!r}; allowed: all, random, window, progressive")
        steps = self.candidates(num_inference_steps, rule)
        count = len(steps) if self.kind == "all" else self.num_sde_steps
        if count is None or not 1 <= count <= len(steps):
            raise ValueError(
                f"sampling.sde.num_sde_steps is {count}; allowed: 1 to {len(steps)} "
                f"(steps {steps[:1]}..{steps[-1:]} of {num_inference_steps} by fraction {list(self.fraction)} and rule {rule})"
            )
        return count

    def resolve(
        self, *, seed: int, group_id: str, iteration: int, num_inference_steps: int, rule: Rule
    ) -> list[int]:
        """The trained steps of one group in one iteration, ascending."""
        count = self.check(num_inference_steps, rule)
        steps = self.candidates(num_inference_steps, rule)
        if self.kind == "all":
            return steps
        last_start = len(steps) - count
        if self.kind == "progressive":
            start = (iteration // self.iterations_per_shift) % (last_start + 1)
            return steps[start : start + count]
        digest = hashlib.blake2b(f"{seed}:{group_id}:{iteration}".encode(), digest_size=8).digest()
        draw = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))
        if self.kind == "window":
            start = int(draw.integers(last_start + 1))
            return steps[start : start + count]
        return sorted(draw.choice(steps, size=count, replace=False).tolist())

    def for_rows(
        self, ids: Sequence[str], *, seed: int, iteration: int, num_inference_steps: int, rule: Rule
    ) -> torch.Tensor:
        """int64 `[N, S]`."""
        sets: dict[str, list[int]] = {}
        for group in map(group_of, ids):
            if group not in sets:
                sets[group] = self.resolve(
                    seed=seed,
                    group_id=group,
                    iteration=iteration,
                    num_inference_steps=num_inference_steps,
                    rule=rule,
                )
        return torch.tensor([sets[group_of(i)] for i in ids], dtype=torch.int64)
