# SPDX-License-Identifier: Apache-2.0
"""Sigma schedules, float64, from 1 to 0."""

from __future__ import annotations

import math

import torch


def shifted_sigmas(num_inference_steps: int, shift: float) -> torch.Tensor:
    """`[T + 1]`: t = linspace(1, 0, T + 1), sigma = shift*t / (1 + (shift - 1)*t) (SD3, arXiv 2403.03206, eq. 23)."""
    if num_inference_steps < 1:
        raise ValueError(f"sampling.num_inference_steps is {num_inference_steps}; allowed: 1 or more")
    if not shift > 0:
        raise ValueError(f"sampling.shift is {shift}; allowed: a number above 0")
    t = torch.linspace(1.0, 0.0, num_inference_steps + 1, dtype=torch.float64)
    return shift * t / (1.0 + (shift - 1.0) * t)


def linear_mu(
    tokens: int, *, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float
) -> float:
    """The line that dynamic shifting draws from (base_tokens, base_shift) to (max_tokens, max_shift)."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (tokens - base_tokens)


def dynamic_sigmas(num_inference_steps: int, mu: float, *, terminal: float | None = None) -> torch.Tensor:
    """`[T + 1]`: the shift exp(mu) of sigmas 1 .. 1/T, stretched so that the last non-zero one is `terminal`, then 0."""
    t = torch.linspace(1.0, 1.0 / num_inference_steps, num_inference_steps, dtype=torch.float64)
    shift = math.exp(mu)
    sigmas = shift / (shift + (1.0 / t - 1.0))
    if terminal is not None and num_inference_steps > 1:
        sigmas = 1.0 - (1.0 - sigmas) * ((1.0 - terminal) / (1.0 - sigmas[-1]))
    return torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])
