# SPDX-License-Identifier: Apache-2.0
"""The loss against values computed by hand, by torch.distributions and by REINFORCE's formula."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.algorithms import FlowGRPO, prepare_advantages
from unirl.algorithms.flow_grpo import kl_to_reference
from unirl.config import AlgorithmConfig
from unirl.protocols import Replay
from unirl.types import LatentSegment, Part


def _rows(old: torch.Tensor, advantages: list[float]) -> Part:
    num_rows, num_steps = old.shape
    segment = LatentSegment(
        latents=torch.zeros(num_rows, 2, 4, 1),
        frame_steps=torch.zeros(num_rows, 2, dtype=torch.int64),
        token_counts=torch.full((num_rows,), 4),
        sde_steps=torch.zeros(num_rows, num_steps, dtype=torch.int64),
        log_probs=old,
        sigmas=torch.zeros(num_rows, 2, dtype=torch.float64),
    )
    return Part(
        ids=tuple(f"p/{i}" for i in range(num_rows)),
        prompts=("",) * num_rows,
        metadata=({},) * num_rows,
        segment=segment,
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )


def _replay(log_probs: torch.Tensor, **means: torch.Tensor) -> Replay:
    return Replay(log_probs=log_probs, token_counts=torch.full((log_probs.shape[0],), 4), **means)


def test_clipping_by_hand():
    old = torch.zeros(4, 1)
    new = torch.log(torch.tensor([[1.2], [0.8], [1.2], [0.8]]))
    loss, metrics = FlowGRPO(AlgorithmConfig(clip_range=0.1)).loss(
        _replay(new), _rows(old, [1.0, -1.0, -1.0, 1.0])
    )
    # max(-A r, -A clip(r, .9, 1.1)): clipped where the move went with the advantage, else as it is.
    torch.testing.assert_close(loss, torch.tensor([-1.1, 0.9, 1.2, -0.8]))
    assert metrics["clip"].tolist() == [1.0] * 4
    torch.testing.assert_close(metrics["ratio"], torch.tensor([1.2, 0.8, 1.2, 0.8], dtype=torch.float64))


def test_mean_over_steps():
    new = torch.log(torch.tensor([[1.0, 1.05]]))
    loss, metrics = FlowGRPO(AlgorithmConfig(clip_range=0.01)).loss(
        _replay(new), _rows(torch.zeros(1, 2), [2.0])
    )
    torch.testing.assert_close(loss, torch.tensor([-(2.0 + 2.0 * 1.01) / 2]))
    assert metrics["clip"].tolist() == [0.5]


def test_first_update_has_loss_zero_and_the_gradient_of_reinforce():
    log_probs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rows = _rows(log_probs.detach().clone(), [1.5, -0.5, -0.5, -0.5])
    loss, metrics = FlowGRPO(AlgorithmConfig(clip_range=1e-4)).loss(_replay(log_probs), rows)
    assert loss.sum().item() == 0.0
    assert metrics["abs_ratio_minus_one_max"].tolist() == [0.0] * 4
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    # d/dlogp of -A exp(logp - old) at equality: -A, and 1/S for the mean over steps.
    expected = -rows.advantages.float()[:, None].expand(4, 3) / 3
    torch.testing.assert_close(gradient, expected)


def test_advantages_are_clipped():
    loss, _ = FlowGRPO(AlgorithmConfig(adv_clip=2.0)).loss(
        _replay(torch.zeros(3, 1)), _rows(torch.zeros(3, 1), [7.0, -7.0, 1.0])
    )
    assert loss.tolist() == [-2.0, 2.0, -1.0]
    free, _ = FlowGRPO(AlgorithmConfig(adv_clip=None)).loss(
        _replay(torch.zeros(1, 1)), _rows(torch.zeros(1, 1), [7.0])
    )
    assert free.tolist() == [-7.0]


def test_tiny_ratio_is_not_rounded_to_one():
    new = torch.tensor([[3.1e-9]])
    _, metrics = FlowGRPO(AlgorithmConfig()).loss(_replay(new), _rows(torch.zeros(1, 1), [1.0]))
    assert math.isclose(metrics["abs_ratio_minus_one_max"].item(), 3.1e-9, rel_tol=1e-6)


def test_mean_log_ratio_does_not_depend_on_the_number_of_tokens():
    _, metrics = FlowGRPO(AlgorithmConfig()).loss(
        _replay(torch.full((3, 1), -1e-5)), _rows(torch.zeros(3, 1), [1.0] * 3)
    )
    assert [round(r, 5) for r in metrics["ratio"].tolist()] == [0.99999] * 3


def test_kl_is_that_of_gaussians_of_equal_scale_and_ignores_padding():
    generator = torch.Generator().manual_seed(1)
    means, other = (torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    scales = torch.rand(2, 3, generator=generator, dtype=torch.float64) + 0.1
    counts = torch.tensor([4, 2])
    new = Replay(log_probs=torch.zeros(2, 3), token_counts=counts, means=means, scales=scales)
    reference = Replay(log_probs=torch.zeros(2, 3), token_counts=counts, means=other, scales=scales)
    expected = []
    for row, count in enumerate(counts.tolist()):
        steps = [
            torch.distributions.kl_divergence(
                torch.distributions.Normal(means[row, s, :count], scales[row, s]),
                torch.distributions.Normal(other[row, s, :count], scales[row, s]),
            ).mean()
            for s in range(3)
        ]
        expected.append(torch.stack(steps).mean())
    torch.testing.assert_close(kl_to_reference(new, reference), torch.stack(expected))
    assert kl_to_reference(new, new).tolist() == [0.0, 0.0]


def test_kl_enters_with_beta():
    means = torch.zeros(1, 1, 4, 1)
    new = _replay(torch.zeros(1, 1), means=means, scales=torch.full((1, 1), 0.5))
    reference = _replay(torch.zeros(1, 1), means=means + 0.1, scales=torch.full((1, 1), 0.5))
    loss, metrics = FlowGRPO(AlgorithmConfig(beta=3.0)).loss(new, _rows(torch.zeros(1, 1), [0.0]), reference)
    # .1^2 / (2 * .25) = .02
    torch.testing.assert_close(loss, torch.tensor([0.06]))
    assert metrics["kl_ref"].item() == pytest.approx(0.02)


def test_missing_pieces_are_named():
    algorithm = FlowGRPO(AlgorithmConfig(beta=1.0))
    rows = _rows(torch.zeros(1, 1), [1.0])
    with pytest.raises(ValueError, match=r"algorithm\.beta is 1\.0"):
        algorithm.loss(_replay(torch.zeros(1, 1)), rows)
    with pytest.raises(ValueError, match="no advantages"):
        algorithm.loss(_replay(torch.zeros(1, 1)), rows.replace(advantages=None))


def _scored(rewards: list[float], siblings: int) -> Part:
    count = len(rewards)
    return Part(
        ids=tuple(f"p{i // siblings}/{i % siblings}" for i in range(count)),
        prompts=("",) * count,
        metadata=({},) * count,
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def test_reward_that_is_not_a_number_drops_its_row_and_one_survivor_teaches_nothing():
    part, counts = prepare_advantages(_scored([1.0, 2.0, 3.0, math.nan, 5.0, math.nan], 2), AlgorithmConfig())
    assert part.weights.tolist() == [1, 1, 1, 0, 1, 0]
    assert part.advantages[2:].tolist() == [0.0] * 4
    assert counts == {"groups/total": 3, "groups/informative": 1, "rows/total": 6, "rows/dropped": 2}


def test_groups_without_variance_can_be_dropped():
    scored = _scored([0.7, 0.7, 0.1, 0.9], 2)
    kept, _ = prepare_advantages(scored, AlgorithmConfig())
    assert kept.weights.tolist() == [1, 1, 1, 1] and kept.advantages[:2].tolist() == [0.0, 0.0]
    dropped, counts = prepare_advantages(scored, AlgorithmConfig(drop_zero_variance_groups=True))
    assert dropped.weights.tolist() == [0, 0, 1, 1] and counts["rows/dropped"] == 2
    assert torch.equal(dropped.advantages, kept.advantages)


def test_shuffled_advantages_are_the_same_numbers_in_an_order_of_seed_and_iteration():
    scored = _scored([float(i * i % 7) for i in range(24)], 4)
    plain, _ = prepare_advantages(scored, AlgorithmConfig())
    config = AlgorithmConfig(shuffle_advantages=True)
    one, again, other = (
        prepare_advantages(scored, config, seed=1, iteration=i)[0].advantages for i in (0, 0, 1)
    )
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, plain.advantages)
    assert torch.equal(one.sort().values, plain.advantages.sort().values)
