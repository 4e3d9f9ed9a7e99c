# SPDX-License-Identifier: Apache-2.0
"""From finished groups to a batch with advantages, and the numbers that describe it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unirl.algorithms import prepare_advantages
from unirl.config import RunConfig
from unirl.distributed.slabs import Group
from unirl.reward import combine, component_means
from unirl.types import Part


def build_batch(groups: Sequence[Group], config: RunConfig, iteration: int) -> tuple[Part, dict[str, float]]:
    """The groups' rows with `rewards`, `weights` and `advantages`, and the reward metrics.

    A row whose reward is missing keeps its place with weight 0 and is counted.
    """
    rows = Part.concat([g.sample.frontier.replace(media=None) for g in groups])
    assert rows.component_rewards is not None
    combined = combine(rows.component_rewards, config.reward, rows.group_ids)
    rows = rows.replace(rewards=combined.rewards, weights=combined.weights)
    rows, counts = prepare_advantages(rows, config.algorithm, seed=config.seed, iteration=iteration)
    scored = combined.rewards[combined.weights > 0]
    means = component_means(rows.component_rewards or {}, config.reward, combined.weights)
    metrics = {
        "reward": float(scored.mean()) if len(scored) else float("nan"),
        "reward/std": float(scored.std(correction=0)) if len(scored) else float("nan"),
        **{f"reward/{name}": value for name, value in means.items()},
        **{f"reward/{name}/failed": n for name, n in combined.counts.items() if name != "dropped" and n},
        **counts,
    }
    return rows, metrics


def batch_warnings(rows: Part) -> list[str]:
    """What keeps a batch from teaching anything; the same text whenever it happens."""
    assert rows.advantages is not None
    live = rows.live_weights() > 0
    if not live.any():
        return [
            "no row of a rollout could train: each was left out (rows/dropped), because a training reward failed "
            "(reward/<name>/failed; the workers' logs say why) or algorithm.drop_zero_variance_groups leaves out its group"
        ]
    if not rows.advantages[live].any():
        return [
            "a rollout taught nothing: all rewards that are compared with each other are equal; the scorers tell its rows not "
            "apart, or its rows are all alike: see reward.scorers, samples_per_prompt, sampling.eta"
        ]
    return []


def batch_seconds(groups: Sequence[Group]) -> dict[str, float]:
    """Seconds of the generations that the groups came from, each counted by the share of it that is used here."""
    totals: dict[str, float] = {}
    for group in groups:
        for phase, seconds in group.seconds.items():
            totals[f"perf/{phase}"] = totals.get(f"perf/{phase}", 0.0) + seconds / group.num_groups
    return totals


def canvas_metrics(rows: Part) -> dict[str, float]:
    """Reward by canvas, when there are several."""
    assert rows.rewards is not None
    canvases = rows.canvases()
    live = rows.live_weights() > 0
    by_canvas: dict[str, list[int]] = {}
    for i, canvas in enumerate(canvases):
        if live[i]:
            by_canvas.setdefault(f"{canvas.height}x{canvas.width}", []).append(i)
    if len(by_canvas) < 2:
        return {}
    return {
        f"canvas/{name}/reward": float(rows.rewards[torch.tensor(i)].mean())
        for name, i in sorted(by_canvas.items())
    }
