# SPDX-License-Identifier: Apache-2.0
"""How long a run will take, from its arithmetic and the speed of this machine's matrix products of the model's own shapes."""

from __future__ import annotations

import time

import torch

from unirl.config import RunConfig
from unirl.cores import usable_cores
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
    speed = _flops_per_s(limits.hidden_size, limits.intermediate_size, config.threads_per_worker)
    token_s = 2 * limits.active_params / speed
    forward_s = OVERHEAD * rows * tokens * branches * token_s
    trained = config.sampling.sde.check(config.sampling.num_inference_steps, config.sampling.rule)
    train_ranks, rollout_ranks = config.slab_sizes()
    at_once = train_ranks + rollout_ranks if asynchronous else max(train_ranks, rollout_ranks)
    share = _share_of_a_core(config, at_once)
    generate_s = forward_s * config.sampling.num_inference_steps / (rollout_ranks * share)
    train_s = forward_s * trained * BACKWARD_TO_FORWARD / (train_ranks * share)
    step_s = max(generate_s, train_s) if asynchronous else generate_s + train_s
    eval_rows = sum(
        min(len(d), config.eval.num_prompts or len(d)) * config.eval.samples_per_prompt
        for d in requests.eval_sets.values()
    )
    num_evals = 2 + (config.num_rollouts // config.eval_interval if config.eval_interval else 0)
    return step_s * config.num_rollouts + num_evals * generate_s * eval_rows / rows


def _share_of_a_core(config: RunConfig, num_ranks: int) -> float:
    """What a thread of so many ranks gets of a core of this machine; 1 where they have devices, or another cluster's cores."""
    if torch.cuda.is_available() or config.ray_address is not None:
        return 1.0
    return min(1.0, len(usable_cores()) / (num_ranks * config.threads_per_worker))


def _flops_per_s(hidden_size: int, intermediate_size: int, threads: int) -> float:
    """Of one worker: the fastest of some tries, for whatever else the machine does makes a try slower and none faster."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens = 2048
    left = torch.randn(tokens, hidden_size, device=device, dtype=dtype)
    right = torch.randn(hidden_size, intermediate_size, device=device, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fastest_s = min(_product_s(left, right) for _ in range(20))
    finally:
        torch.set_num_threads(before)
    return 2 * tokens * hidden_size * intermediate_size / fastest_s


def _product_s(left: torch.Tensor, right: torch.Tensor) -> float:
    begin = time.perf_counter()
    for _ in range(4):
        product = left @ right
    float(product[0, 0])  # waits for the device
    return (time.perf_counter() - begin) / 4
