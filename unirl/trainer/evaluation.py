# SPDX-License-Identifier: Apache-2.0
"""Evaluation: every set under fixed ids, so the same noise every time, on the policy that the rollout engine holds."""

from __future__ import annotations

import torch

from unirl.config import RunConfig
from unirl.metrics import write_samples
from unirl.reward.set_metrics import set_metrics
from unirl.trainer.session import Session
from unirl.types import Part


def evaluate(session: Session, step: int) -> dict[str, float]:
    """Metrics of all evaluation sets; the images of the first one go to `samples/eval_<step>.npz`.

    The first set's numbers are `eval/<name>`, the others' `eval/<set>/<name>`.
    """
    config, requests = session.config, session.requests
    metrics: dict[str, float] = {}
    for index, name in enumerate(requests.eval_sets):
        rows = session.rollout.evaluate(requests.evaluation(name)).frontier
        prefix = "eval" if index == 0 else f"eval/{name}"
        numbers = describe(rows, config)
        metrics.update({f"{prefix}/{key}": value for key, value in numbers.items()})
        if index == 0:
            assert rows.media is not None and rows.push_version is not None
            metrics["eval/version"] = int(rows.push_version.max())
            scores = weighted_reward(rows, config).tolist()
            path = session.run_dir.samples / f"eval_{step:06d}.npz"
            with session.writing("the evaluation's samples"):
                write_samples(path, rows.media, rows.prompts, rows.ids, scores)
    return metrics


def describe(rows: Part, config: RunConfig) -> dict[str, float]:
    """Mean reward, mean of every scorer, and the set metrics. A scorer that failed on a row gives NaN, never a lower mean."""
    assert rows.component_rewards is not None
    numbers = {"reward": float(weighted_reward(rows, config).mean())}
    numbers.update({name: float(values.mean()) for name, values in rows.component_rewards.items()})
    return numbers | set_metrics(config.eval.set_metrics, rows)


def weighted_reward(rows: Part, config: RunConfig) -> torch.Tensor:
    """float64 `[N]`: the weighted sum of the training rewards, never normalised, so that evaluations compare."""
    assert rows.component_rewards is not None
    total = torch.zeros(len(rows), dtype=torch.float64)
    for scorer in config.reward.scorers:
        if scorer.weight != 0:
            total += scorer.weight * rows.component_rewards[scorer.name]
    return total
