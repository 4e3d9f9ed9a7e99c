# SPDX-License-Identifier: Apache-2.0
"""The numbers of a training step and of the async runtime under their public metric names."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.rollout.async_runtime import AsyncStats
from unirl.train.stack import TrainResult


def train_warnings(results: Sequence[TrainResult]) -> list[str]:
    """What the ranks want the user to know, each text once."""
    return list(dict.fromkeys(w for r in results for w in r.warnings))


def staleness_metrics(stats: AsyncStats) -> dict[str, float]:
    """Age of the step's groups in pushes, and the state of the pipeline."""
    ages = stats.staleness
    return {
        "async/staleness": sum(ages) / len(ages),
        "async/staleness_max": max(ages),
        "async/buffered_groups": stats.num_buffered_groups,
        "async/inflight_groups": stats.num_inflight_groups,
        "async/evicted_groups": stats.num_evicted,
        "async/reissued_groups": stats.num_reissued,
    }
