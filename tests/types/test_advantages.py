# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

import pytest
import torch

from unirl.types import Part
from unirl.types.advantages import group_advantages, informative_groups

REWARDS = torch.tensor([1.0, 2, 3, 4, 10, 20, 30, 40], dtype=torch.float64)
GROUPS = ["r0.p0"] * 4 + ["r0.p1"] * 4
ONES = torch.ones(8, dtype=torch.float64)
FOUR = [-1.3416, -0.4472, 0.4472, 1.3416]


def _close(got: torch.Tensor, want: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=5e-5, rtol=0)


def test_group_scope_standardises_within_each_group() -> None:
    _close(group_advantages(REWARDS, GROUPS, ONES), FOUR + FOUR)


def test_global_std_takes_the_groups_mean_and_the_batchs_std() -> None:
    want = [-0.1089, -0.0363, 0.0363, 0.1089, -1.0891, -0.3630, 0.3630, 1.0891]
    _close(group_advantages(REWARDS, GROUPS, ONES, use_global_std=True), want)


def test_batch_scope_takes_both_from_the_batch() -> None:
    want = [-0.9257, -0.8531, -0.7805, -0.7079, -0.2723, 0.4538, 1.1799, 1.9059]
    _close(group_advantages(REWARDS, GROUPS, ONES, scope="batch"), want)


def test_equal_rewards_give_exactly_zero() -> None:
    values = torch.tensor([0.7, 0.7, 0.7], dtype=torch.float64)
    assert group_advantages(values, ["g"] * 3, torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


def test_permuting_rows_permutes_advantages() -> None:
    order = list(range(8))
    random.Random(3).shuffle(order)
    straight = group_advantages(REWARDS, GROUPS, ONES)
    permuted = group_advantages(REWARDS[order], [GROUPS[i] for i in order], ONES)
    assert torch.equal(permuted, straight[order])


def test_a_dead_row_stays_out_of_its_groups_statistics() -> None:
    values = REWARDS.clone()
    values[3] = 1e9
    weights = ONES.clone()
    weights[3] = 0
    got = group_advantages(values, GROUPS, weights)
    _close(got[:4], [-1.2247, 0.0, 1.2247, 0.0])


def test_one_survivor_gets_zero_and_its_group_is_not_informative() -> None:
    weights = ONES.clone()
    weights[1:4] = 0
    values = REWARDS.clone()
    values[1:4] = torch.nan
    got = group_advantages(values, GROUPS, weights)
    assert got[:4].tolist() == [0.0] * 4
    assert informative_groups(values, GROUPS, weights) == ["r0.p1"]


def test_unknown_scope_names_the_key_and_the_allowed_values() -> None:
    with pytest.raises(ValueError, match=r"algorithm.advantage_scope is 'global'; allowed: group, batch"):
        group_advantages(REWARDS, GROUPS, ONES, scope="global")  # type: ignore[arg-type]


def test_part_computes_them_by_id_not_by_position() -> None:
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    ids = tuple(f"{GROUPS[i]}/{i % 4}" for i in order)
    part = Part(ids=ids, prompts=("a",) * 8, metadata=({},) * 8, rewards=REWARDS[order]).compute_advantages()
    assert part.advantages is not None
    _close(part.advantages, [a for pair in zip(FOUR, FOUR, strict=True) for a in pair])
