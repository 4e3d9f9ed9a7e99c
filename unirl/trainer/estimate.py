# SPDX-License-Identifier: Apache-2.0
"""How long a run will take, from its arithmetic and the speed of this machine's matrix products of the model's own shapes."""

from __future__ import annotations

import statistics
import time

import torch

from unirl.config import RunConfig
from unirl.distributed.models import model_limits
from unirl.trainer.requests import Requests

BACKWARD_TO_FORWARD = 3.0
"""A replayed step costs a forward pass and about twice that to go back through it."""
OVERHEAD = 2.5
"""Whole step over its matrix products: attention, norms, noise, scoring, transport. A rough figure."""


def estimate_seconds(config: RunConfig, requests: Requests, *, asynchronous: bool) -> float:
    """Seconds of the whole run, evaluation included, without the workers' start."""
    limits = model_limits(config)
    tokens = config.sampling.height * config.sampling.width / limits.pixel_stride**2
    rows = config.batch_size * config.samples_per_prompt
    branches = 1 + (config.sampling.guidance_scale > 1) + (config.sampling.cfg_img_scale > 1)
    token_s = 2 * limits.active_params / _flops_per_s(limits.hidden_size, limits.intermediate_size)
    forward_s = OVERHEAD * rows * tokens * branches * token_s
    trained = config.sampling.sde.check(config.sampling.num_inference_steps, config.sampling.rule)
    train_ranks, rollout_ranks = config.slab_sizes()
    generate_s = forward_s * config.sampling.num_inference_steps / rollout_ranks
    train_s = forward_s * trained * BACKWARD_TO_FORWARD / train_ranks
    step_s = max(generate_s, train_s) if asynchronous else generate_s + train_s
    eval_rows = sum(
        min(len(d), config.eval.num_prompts or len(d)) * config.eval.samples_per_prompt
        for d in requests.eval_sets.values()
    )
    num_evals = 2 + (config.num_rollouts // config.eval_interval if config.eval_interval else 0)
    return step_s * config.num_rollouts + num_evals * generate_s * eval_rows / rows


def _flops_per_s(hidden_size: int, intermediate_size: int) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = 2048
    left = torch.randn(tokens, hidden_size, device=device, dtype=dtype)
    right = torch.randn(hidden_size, intermediate_size, device=device, dtype=dtype)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(4):
            product = left @ right
        float(product[0, 0])  # waits for the device
        seconds.append((time.perf_counter() - begin) / 4)
    return 2 * tokens * hidden_size * intermediate_size / statistics.median(seconds)
