# SPDX-License-Identifier: Apache-2.0
"""From rewards to the advantages and weights that a training step uses, as the `algorithm` section asks."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from unirl.config import AlgorithmConfig
from unirl.types import Part
from unirl.types.advantages import informative_groups


def prepare_advantages(
    part: Part, config: AlgorithmConfig, *, seed: int = 0, iteration: int = 0
) -> tuple[Part, dict[str, float]]:
    """Sets `advantages`, and weight 0 on rows that cannot train.

    A row whose reward is not finite gets weight 0: it keeps its place and takes no part. With
    `drop_zero_variance_groups` the rows of groups that teach nothing (fewer than two live rows, or equal
    rewards) get weight 0 as well. With `shuffle_advantages` (a control that must not learn) the live rows'
    advantages are permuted, by (seed, iteration).

    Args:
        part: scored rows of the whole batch.

    Returns:
        the rows, and counts: `groups/total`, `groups/informative`, `rows/total`, `rows/dropped` (weight 0).
    """
    if part.rewards is None:
        raise ValueError("prepare_advantages: the rows have no rewards yet; score them first")
    rewards = part.rewards.to(torch.float64)
    weights = torch.where(torch.isfinite(rewards), part.live_weights().to(torch.float64), 0.0)
    part = part.replace(weights=weights).compute_advantages(
        scope=config.advantage_scope, use_global_std=config.adv_use_global_std
    )
    teaching = set(informative_groups(rewards, part.group_ids, weights))
    if config.drop_zero_variance_groups:
        kept = torch.tensor([group in teaching for group in part.group_ids], dtype=torch.bool)
        weights = torch.where(kept, weights, 0.0)
    advantages = part.advantages
    assert advantages is not None
    if config.shuffle_advantages:
        advantages = _shuffled(advantages, weights, seed, iteration)
    counts = {
        "groups/total": float(len(set(part.group_ids))),
        "groups/informative": float(len(teaching)),
        "rows/total": float(len(part)),
        "rows/dropped": float((weights == 0).sum()),
    }
    return part.replace(weights=weights, advantages=advantages), counts


def _shuffled(advantages: torch.Tensor, weights: torch.Tensor, seed: int, iteration: int) -> torch.Tensor:
    live = torch.nonzero(weights > 0).flatten()
    digest = hashlib.blake2b(f"{seed}:shuffle:{iteration}".encode(), digest_size=8).digest()
    order = np.random.Generator(np.random.Philox(int.from_bytes(digest, "little"))).permutation(len(live))
    result = advantages.clone()
    result[live] = advantages[live[torch.from_numpy(order)]]
    return result
