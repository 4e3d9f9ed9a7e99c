# SPDX-License-Identifier: Apache-2.0
"""Several rewards into one, and what becomes of a row that one of them could not score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from unirl.config import RewardConfig
from unirl.reward.score import ScoringFailure


class Combined(NamedTuple):
    """What training takes from N scored rows.

    Attributes:
        rewards: float64 `[N]`; NaN where a training reward is missing.
        weights: float64 `[N]`; 0 where a training reward is missing, else 1.
        counts: rows that each scorer failed on, by name, and rows of weight 0 under `dropped`.
    """

    rewards: torch.Tensor
    weights: torch.Tensor
    counts: dict[str, int]


class RewardError(RuntimeError):
    """A training reward is missing and `reward.on_error` is `raise`."""


def combine(
    component_rewards: Mapping[str, torch.Tensor],
    config: RewardConfig,
    group_ids: Sequence[str],
    failures: Sequence[ScoringFailure] = (),
) -> Combined:
    """The weighted sum of the training rewards.

    A scorer of weight 0 is a monitor: it is counted when it fails and changes nothing. With `normalise:
    group` each training reward is first made (r - group mean) / group population std, over the group's live
    rows, and 0 where these are equal: a constant added to one reward or a factor on it then changes nothing
    but rounding.

    Args:
        component_rewards: name to float64 `[N]`, NaN where scoring failed; every training scorer must be
            there.
        config: scorers with their weights, `normalise`, `on_error`.
        group_ids: one a row.
        failures: what `score_rows` recorded, for the message of an error.

    Raises:
        RewardError: a training reward is missing and `on_error` is `raise`.
    """
    num_rows = len(group_ids)
    training = [scorer for scorer in config.scorers if scorer.weight != 0]
    missing = {name: ~torch.isfinite(values) for name, values in component_rewards.items()}
    dead = torch.zeros(num_rows, dtype=torch.bool)
    for scorer in training:
        dead |= missing[scorer.name]
        if config.on_error == "raise" and bool(missing[scorer.name].any()):
            raise RewardError(_message(scorer.name, int(missing[scorer.name].sum()), num_rows, failures))
    rewards = torch.zeros(num_rows, dtype=torch.float64)
    for scorer in training:
        values = component_rewards[scorer.name].to(torch.float64)
        if config.normalise == "group":
            values = _standardised(values, group_ids, ~dead)
        rewards += scorer.weight * values
    rewards[dead] = torch.nan
    counts = {name: int(rows.sum()) for name, rows in missing.items()} | {"dropped": int(dead.sum())}
    return Combined(rewards, (~dead).to(torch.float64), counts)


def component_means(
    component_rewards: Mapping[str, torch.Tensor], config: RewardConfig, weights: torch.Tensor
) -> dict[str, float]:
    """The mean of each reward for the metrics.

    A training reward's mean is over the rows that train (NaN when there are none). A monitor's is over all
    rows, and NaN when it failed on any: a mean of what is left would look like a measurement.
    """
    training = {scorer.name for scorer in config.scorers if scorer.weight != 0}
    live = weights > 0
    return {n: float((v[live] if n in training else v).mean()) for n, v in component_rewards.items()}


def _standardised(values: torch.Tensor, group_ids: Sequence[str], live: torch.Tensor) -> torch.Tensor:
    rows_of: dict[str, list[int]] = {}
    for row, group in enumerate(group_ids):
        if live[row]:
            rows_of.setdefault(group, []).append(row)
    result = torch.zeros_like(values)
    for rows in rows_of.values():
        group = values[rows]
        if group.max() != group.min():
            result[rows] = (group - group.mean()) / group.std(correction=0)
    return result


def _message(name: str, failed: int, num_rows: int, failures: Sequence[ScoringFailure]) -> str:
    first = next((f" (row {f.row_id}: {f.message})" for f in failures if f.scorer == name), "")
    return (
        f"reward {name} is missing for {failed} of {num_rows} rows{first}; reward.on_error is 'raise', "
        "'drop' gives such rows weight 0"
    )
