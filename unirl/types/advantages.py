# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages (GRPO, arXiv 2402.03300), by group id and never by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

EPSILON = 1e-8


def group_advantages(
    rewards: torch.Tensor,
    group_ids: Sequence[str],
    weights: torch.Tensor,
    *,
    scope: Literal["group", "batch"] = "group",
    use_global_std: bool = False,
) -> torch.Tensor:
    """(r - mean) / (population std + 1e-8), float64 `[N]`.

    Args:
        rewards: `[N]`.
        group_ids: one a row; rows of a group need not be contiguous, nor groups equal.
        weights: `[N]`; rows of weight 0 stay out of the statistics and get 0.
        scope: `batch` takes mean and std from all live rows.
        use_global_std: the group's mean and the batch's std.

    A group with fewer than two live rows gets 0, and so does one whose live rewards are all equal (exactly 0).
    """
    if scope not in ("group", "batch"):
        raise ValueError(f"algorithm.advantage_scope is {scope!r}; allowed: group, batch")
    values = rewards.to(torch.float64)
    live = (weights > 0) & torch.isfinite(values)
    result = torch.zeros(len(values), dtype=torch.float64)
    if not bool(live.any()):
        return result
    batch_std = values[live].std(correction=0)
    members: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        if live[i]:
            members.setdefault(group if scope == "group" else "", []).append(i)
    for rows in members.values():
        members_rewards = values[rows]
        if len(rows) < 2 or members_rewards.max() == members_rewards.min():
            continue
        std = batch_std if use_global_std else members_rewards.std(correction=0)
        result[rows] = (members_rewards - members_rewards.mean()) / (std + EPSILON)
    return result


def informative_groups(rewards: torch.Tensor, group_ids: Sequence[str], weights: torch.Tensor) -> list[str]:
    """Ids of the groups that can teach something: at least two live rows whose rewards differ."""
    values: dict[str, list[float]] = {}
    for group, reward, weight in zip(group_ids, rewards.tolist(), weights.tolist(), strict=True):
        if weight > 0:
            values.setdefault(group, []).append(reward)
    return [g for g, v in values.items() if len(v) > 1 and max(v) != min(v)]
