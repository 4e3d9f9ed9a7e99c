# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch

from unirl.config import RewardConfig, ScorerConfig
from unirl.reward import RewardError, ScoringFailure, combine, component_means
from unirl.types.advantages import group_advantages, informative_groups

NAN = math.nan


def _config(weights, **options):
    scorers = tuple(ScorerConfig(name=name, weight=weight) for name, weight in weights.items())
    return RewardConfig(scorers=scorers, **options)


def _tensors(**columns):
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


GROUPS = ["a"] * 4 + ["b"] * 4


def test_rewards_are_summed_by_their_weights():
    rewards, weights, counts = combine(
        _tensors(x=[1.0, 2.0], y=[10.0, -4.0], seen=[5.0, 5.0]),
        _config({"x": 2.0, "y": -0.5, "seen": 0.0}),
        ["a", "a"],
    )
    assert rewards.tolist() == [-3.0, 6.0] and rewards.dtype == torch.float64
    assert weights.tolist() == [1.0, 1.0]
    assert counts == {"x": 0, "y": 0, "seen": 0, "dropped": 0}


def test_training_reward_missing_for_1_of_16_rows_gives_that_row_weight_0_and_counts_it():
    values = [0.1 * i for i in range(16)]
    values[5] = NAN
    groups = [str(i // 4) for i in range(16)]
    rewards, weights, counts = combine(_tensors(x=values), _config({"x": 1.0}), groups)
    assert weights.tolist() == [float(i != 5) for i in range(16)]
    assert math.isnan(rewards[5]) and torch.isfinite(rewards).sum() == 15
    assert counts == {"x": 1, "dropped": 1}
    advantages = group_advantages(rewards, groups, weights)
    assert advantages[5] == 0
    # The three left of its group: .4 .6 .7, mean .5667, population std .1247.
    assert torch.allclose(advantages[[4, 6, 7]], torch.tensor([-1.3363, 0.2673, 1.0690]).double(), atol=1e-4)


def test_monitor_that_fails_gives_nan_in_the_metrics_and_touches_no_weight():
    components = _tensors(x=[1.0, 2.0, 3.0, 4.0], seen=[1.0, NAN, 1.0, 1.0])
    config = _config({"x": 1.0, "seen": 0.0}, on_error="raise")
    rewards, weights, counts = combine(components, config, ["a"] * 4)
    assert rewards.tolist() == [1.0, 2.0, 3.0, 4.0] and weights.tolist() == [1.0] * 4
    assert counts == {"x": 0, "seen": 1, "dropped": 0}
    means = component_means(components, config, weights)
    assert means["x"] == 2.5 and math.isnan(means["seen"])


def test_mean_of_a_training_reward_leaves_dropped_rows_out():
    components = _tensors(x=[1.0, NAN, 3.0], y=[10.0, 1000.0, 20.0])
    config = _config({"x": 1.0, "y": 1.0})
    _, weights, _ = combine(components, config, ["a"] * 3)
    assert component_means(components, config, weights) == {"x": 2.0, "y": 15.0}
    assert math.isnan(component_means(components, config, torch.zeros(3))["x"])


def test_on_error_raise_stops_and_says_which_row_and_why():
    failures = [ScoringFailure("x", "r0.p0/1", "RuntimeError: no such face")]
    with pytest.raises(
        RewardError, match=r"x is missing for 1 of 2 rows \(row r0.p0/1: RuntimeError: no such face\)"
    ):
        combine(_tensors(x=[1.0, NAN]), _config({"x": 1.0}, on_error="raise"), ["a", "a"], failures)


@pytest.mark.parametrize("changed", ["x", "y"])
@pytest.mark.parametrize("change", [lambda r: r + 100.0, lambda r: r * 10.0, lambda r: r * 0.01 - 7.0])
def test_adding_a_constant_to_one_normalised_reward_or_scaling_it_changes_nothing(changed, change):
    generator = torch.Generator().manual_seed(0)
    components = {name: torch.rand(8, generator=generator, dtype=torch.float64) for name in "xy"}
    config = _config({"x": 1.0, "y": 0.3}, normalise="group")
    reference = combine(components, config, GROUPS).rewards
    altered = combine({**components, changed: change(components[changed])}, config, GROUPS).rewards
    assert torch.allclose(altered, reference, rtol=0, atol=1e-12)
    # Without normalisation the same change moves the result.
    plain = _config({"x": 1.0, "y": 0.3})
    moved = combine({**components, changed: change(components[changed])}, plain, GROUPS).rewards
    assert not torch.allclose(moved, combine(components, plain, GROUPS).rewards, atol=1e-3)


def test_group_normalisation_has_the_value_of_its_formula_and_follows_its_rows():
    components = _tensors(x=[1, 2, 3, 4, 10, 20, 30, 40])
    config = _config({"x": 2.0}, normalise="group")
    rewards = combine(components, config, GROUPS).rewards
    # Two groups of equal shape, and 2 x the standard score -1.3416, -.4472, ...
    expected = torch.tensor([-2.6833, -0.8944, 0.8944, 2.6833] * 2, dtype=torch.float64)
    assert torch.allclose(rewards, expected, atol=1e-4)
    order = [3, 6, 0, 5, 7, 1, 4, 2]
    moved = combine({"x": components["x"][order]}, config, [GROUPS[i] for i in order]).rewards
    assert torch.allclose(moved, rewards[order], atol=1e-15)


def test_normalisation_leaves_dropped_rows_out_of_every_rewards_statistics():
    components = _tensors(x=[NAN, 2.0, 4.0], y=[1000.0, 1.0, 3.0])
    rewards = combine(components, _config({"x": 1.0, "y": 1.0}, normalise="group"), ["a"] * 3).rewards
    assert rewards[1:].tolist() == [-2.0, 2.0] and math.isnan(rewards[0])


def test_equal_rewards_in_a_group_normalise_to_exactly_0():
    rewards = combine(_tensors(x=[0.7, 0.7, 0.7]), _config({"x": 1.0}, normalise="group"), ["a"] * 3).rewards
    assert rewards.tolist() == [0.0, 0.0, 0.0]


def test_one_survivor_in_a_group_has_advantage_0_and_does_not_inform():
    components = _tensors(x=[NAN, NAN, 0.4, 0.2, 0.8, 0.5])
    groups = ["a", "a", "a", "b", "b", "b"]
    for normalise in ("none", "group"):
        rewards, weights, counts = combine(components, _config({"x": 1.0}, normalise=normalise), groups)
        assert counts["dropped"] == 2
        advantages = group_advantages(rewards, groups, weights)
        assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
        assert informative_groups(rewards, groups, weights) == ["b"]
