# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate over the stochastic steps of a denoising trajectory."""

from __future__ import annotations

import torch

from unirl.config import AlgorithmConfig
from unirl.protocols import Replay
from unirl.types import Part


class FlowGRPO:
    """Loss of N replayed rows.

    With r = exp(new - old), the ratio of a row's transition under the current and under the generating
    weights, and A the row's advantage clamped to +-`adv_clip`:

        loss = mean over the S trained steps of max(-A r, -A clip(r, 1 - clip_range, 1 + clip_range)) + beta *
        KL

    KL is that of two Gaussians of equal scale, mean over a row's real elements of (mean - reference mean)^2 /
    (2 scale^2), averaged over the steps. Log-probs are means over elements, so `clip_range` means the same on
    every canvas.

    With one update a rollout every ratio is 1: the loss then has the value -A, which averages to 0 over a
    group, and the gradient of REINFORCE. That is right, and not a sign of nothing being learnt.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config

    @property
    def needs_means(self) -> bool:
        """Whether `loss` wants transition means, of the policy and of the reference."""
        return self.config.beta != 0.0

    def loss(
        self, new: Replay, part: Part, reference: Replay | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Per-row loss and what there is to know about the ratios.

        Args:
            new: the replay under the current weights; with `beta` != 0 it holds `means` and `scales`.
            part: the same rows; `segment.log_probs` are the old log-probs, `advantages` must be set.
            reference: the replay under the reference weights, wanted when `beta` != 0.

        Returns:
            loss: float32 `[N]`, differentiable through `new`. Row weights are not in it: the caller applies
                them.
            metrics: detached float64 tensors. Per row, `[N]`: `ratio`, `clip`, `approx_kl`, `loss`, and
                `kl_ref` with `beta`; the row's largest: `abs_dlogp_max`, `abs_ratio_minus_one_max`.

        Raises:
            ValueError: advantages or, with `beta`, the reference are missing.
        """
        if part.advantages is None:
            raise ValueError("FlowGRPO.loss: the rows have no advantages; call Part.compute_advantages first")
        device = new.log_probs.device
        old = part.segment.log_probs.to(device=device, dtype=torch.float32)
        advantages = part.advantages.to(torch.float64)
        if self.config.adv_clip is not None:
            advantages = advantages.clamp(-self.config.adv_clip, self.config.adv_clip)
        advantage = advantages.to(device=device, dtype=torch.float32)[:, None]
        delta = new.log_probs - old
        ratio = torch.exp(delta)
        low, high = 1.0 - self.config.clip_range, 1.0 + self.config.clip_range
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        loss = surrogate.mean(dim=1)
        metrics = _ratio_metrics(delta.detach(), self.config.clip_range)
        if self.needs_means:
            if reference is None:
                raise ValueError(
                    f"FlowGRPO.loss: algorithm.beta is {self.config.beta}, which needs the reference's replay"
                )
            divergence = kl_to_reference(new, reference)
            loss = loss + self.config.beta * divergence
            metrics["kl_ref"] = divergence.detach().double()
        metrics["loss"] = loss.detach().double()
        return loss, metrics


def _ratio_metrics(delta: torch.Tensor, clip_range: float) -> dict[str, torch.Tensor]:
    """Row values `[N]` from the float32 log-ratios `[N, S]`.

    In float64 and by expm1: a float32 ratio cannot tell 1 + 3e-9 from 1.
    """
    wide = delta.double()
    minus_one = torch.expm1(wide)
    return {
        "ratio": 1.0 + minus_one.mean(dim=1),
        "clip": (minus_one.abs() > clip_range).double().mean(dim=1),
        "approx_kl": 0.5 * wide.square().mean(dim=1),
        "abs_dlogp_max": wide.abs().amax(dim=1),
        "abs_ratio_minus_one_max": minus_one.abs().amax(dim=1),
    }


def kl_to_reference(new: Replay, reference: Replay) -> torch.Tensor:
    """`[N]`: KL of the transitions to the reference's, a mean over real elements (never padding) and over
    steps.

    Both have the same scale, so the divergence of one element is (mean - reference mean)^2 / (2 scale^2); of
    a replay against itself it is exactly 0.
    """
    for name, replay in (("policy", new), ("reference", reference)):
        if replay.means is None or replay.scales is None:
            raise ValueError(
                f"kl_to_reference: the {name}'s replay has no means and scales; replay with with_means=True"
            )
    means, scales = new.means, new.scales
    assert means is not None and scales is not None and reference.means is not None
    tokens = torch.arange(means.shape[2], device=means.device)
    counts = new.token_counts.to(means.device)
    real = (tokens < counts[:, None])[:, None, :, None]
    squares = torch.where(real, (means - reference.means).square(), 0.0).flatten(2).sum(dim=2)
    elements = (counts * means.shape[3])[:, None]
    return (squares / elements / (2.0 * scales.square())).mean(dim=1)
