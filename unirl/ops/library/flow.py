# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.flow_step``, ``flow_log_prob`` and its backward.

Row arguments are float64 ``[N]``; ``noise_level`` is eta, or sin(eta pi / 2) for ``cps``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.flow import (
    RULES,
    StepArguments,
    compute_dtype,
    flow_log_prob_backward_reference,
    flow_log_prob_reference,
    flow_step_reference,
)

_ROWS = "Tensor sigma, Tensor sigma_next, Tensor sigma_max, Tensor noise_level, Tensor? lengths, str rule"
_TAGS = (torch.Tag.pt2_compliant_tag,)

torch.library.define(
    "unirl::flow_step",
    f"(Tensor sample, Tensor velocity, {_ROWS}, int seed, Tensor row_keys, int step, int stream, "
    "ScalarType trajectory_dtype) -> (Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "unirl::flow_log_prob",
    f"(Tensor sample, Tensor velocity, Tensor next_sample, {_ROWS}, bool with_mean) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
torch.library.define(
    "unirl::flow_log_prob_backward",
    f"(Tensor grad_log_prob, Tensor? grad_mean, Tensor sample, Tensor velocity, Tensor next_sample, {_ROWS}) "
    "-> Tensor",
    tags=_TAGS,
)


class _NativeStep:
    """The arguments of a native call; it keeps the tensors alive whose addresses it holds."""

    def __init__(self, sample: Tensor, rows: StepArguments, rule: str) -> None:
        self.tensors = [tensor if tensor is None else tensor.contiguous() for tensor in rows]
        addresses = [_native.address(tensor) for tensor in self.tensors]
        self.step = (*addresses, RULES.index(rule))
        self.shape = (sample.shape[0], sample.shape[1], math.prod(sample.shape[2:]))
        self.wide = sample.dtype is torch.float64


@torch.library.impl("unirl::flow_step", "cpu")
def _flow_step_cpu(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    seed: int,
    row_keys: Tensor,
    step: int,
    stream: int,
    trajectory_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    if default_backend("flow", "cpu") == REFERENCE:
        return flow_step_reference(
            sample, velocity, rows, rule, seed, row_keys, step, stream, trajectory_dtype
        )
    call = _NativeStep(sample, rows, rule)
    following = torch.empty(sample.shape, dtype=trajectory_dtype)
    log_prob = torch.empty(sample.shape[0], dtype=compute_dtype(sample))
    x, v, keys = _native.contiguous_rows(sample), _native.contiguous_rows(velocity), row_keys.contiguous()
    _native.kernels().flow_step(
        call.wide,
        _native.rows(x),
        _native.rows(v),
        call.step,
        call.shape,
        seed,
        keys.data_ptr(),
        step,
        stream,
        _native.rows(following),
        log_prob.data_ptr(),
        _native.num_threads(),
    )
    return following, log_prob


@torch.library.impl("unirl::flow_step", "cuda")
def _flow_step_cuda(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    seed: int,
    row_keys: Tensor,
    step: int,
    stream: int,
    trajectory_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    if default_backend("flow", "cuda") == REFERENCE:
        return flow_step_reference(
            sample, velocity, rows, rule, seed, row_keys, step, stream, trajectory_dtype
        )
    from unirl.ops.triton.flow import flow_step

    return flow_step(sample, velocity, rows, rule, seed, row_keys, step, stream, trajectory_dtype)


@torch.library.register_fake("unirl::flow_step")
def _flow_step_fake(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    seed: int,
    row_keys: Tensor,
    step: int,
    stream: int,
    trajectory_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    log_prob = sample.new_empty(sample.shape[0], dtype=compute_dtype(sample))
    return sample.new_empty(sample.shape, dtype=trajectory_dtype), log_prob


@torch.library.impl("unirl::flow_log_prob", "cpu")
def _flow_log_prob_cpu(
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    with_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    if default_backend("flow", "cpu") == REFERENCE:
        return flow_log_prob_reference(sample, velocity, next_sample, rows, rule, with_mean)
    call = _NativeStep(sample, rows, rule)
    x, v, y = (_native.contiguous_rows(tensor) for tensor in (sample, velocity, next_sample))
    dtype = compute_dtype(sample)
    log_prob = torch.empty(sample.shape[0], dtype=dtype)
    scale = torch.empty(sample.shape[0], dtype=dtype)
    mean = torch.empty(sample.shape if with_mean else (0,), dtype=dtype)
    _native.kernels().flow_log_prob(
        call.wide,
        _native.rows(x),
        _native.rows(v),
        _native.rows(y),
        call.step,
        call.shape,
        log_prob.data_ptr(),
        _native.rows(mean) if with_mean else _native.NO_ROWS,
        scale.data_ptr(),
        _native.num_threads(),
    )
    return log_prob, mean, scale


@torch.library.impl("unirl::flow_log_prob", "cuda")
def _flow_log_prob_cuda(
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    with_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    if default_backend("flow", "cuda") == REFERENCE:
        return flow_log_prob_reference(sample, velocity, next_sample, rows, rule, with_mean)
    from unirl.ops.triton.flow import flow_log_prob

    return flow_log_prob(sample, velocity, next_sample, rows, rule, with_mean)


@torch.library.register_fake("unirl::flow_log_prob")
def _flow_log_prob_fake(
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
    with_mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(sample)
    per_row = (sample.shape[0],)
    mean = sample.new_empty(sample.shape if with_mean else (0,), dtype=dtype)
    return sample.new_empty(per_row, dtype=dtype), mean, sample.new_empty(per_row, dtype=dtype)


@torch.library.impl("unirl::flow_log_prob_backward", "cpu")
def _flow_log_prob_backward_cpu(
    grad_log_prob: Tensor,
    grad_mean: Tensor | None,
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
) -> Tensor:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    if default_backend("flow", "cpu") == REFERENCE:
        return flow_log_prob_backward_reference(
            grad_log_prob, grad_mean, sample, velocity, next_sample, rows, rule
        )
    call = _NativeStep(sample, rows, rule)
    x, v, y = (_native.contiguous_rows(tensor) for tensor in (sample, velocity, next_sample))
    upstream = grad_log_prob.to(compute_dtype(sample)).contiguous()
    upstream_mean = None if grad_mean is None else _native.contiguous_rows(grad_mean)
    grad_velocity = torch.empty(velocity.shape, dtype=velocity.dtype)
    _native.kernels().flow_log_prob_backward(
        call.wide,
        upstream.data_ptr(),
        _native.rows(upstream_mean),
        _native.rows(x),
        _native.rows(v),
        _native.rows(y),
        call.step,
        call.shape,
        _native.rows(grad_velocity),
        _native.num_threads(),
    )
    return grad_velocity


@torch.library.impl("unirl::flow_log_prob_backward", "cuda")
def _flow_log_prob_backward_cuda(
    grad_log_prob: Tensor,
    grad_mean: Tensor | None,
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
) -> Tensor:
    rows = StepArguments(sigma, sigma_next, sigma_max, noise_level, lengths)
    arguments = (grad_log_prob, grad_mean, sample, velocity, next_sample, rows, rule)
    if default_backend("flow", "cuda") == REFERENCE:
        return flow_log_prob_backward_reference(*arguments)
    from unirl.ops.triton.flow import flow_log_prob_backward

    return flow_log_prob_backward(*arguments)


@torch.library.register_fake("unirl::flow_log_prob_backward")
def _flow_log_prob_backward_fake(
    grad_log_prob: Tensor,
    grad_mean: Tensor | None,
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    sigma_max: Tensor,
    noise_level: Tensor,
    lengths: Tensor | None,
    rule: str,
) -> Tensor:
    return velocity.new_empty(velocity.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, rule, _ = inputs
    ctx.save_for_backward(*tensors)
    ctx.rule = rule
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_log_prob: Tensor | None, grad_mean: Tensor | None, grad_scale: Tensor | None
) -> tuple[Tensor | None, ...]:
    sample, velocity, *others = ctx.saved_tensors
    grad_velocity = None
    if ctx.needs_input_grad[1] and not (grad_log_prob is None and grad_mean is None):
        if grad_log_prob is None:
            grad_log_prob = sample.new_zeros(sample.shape[0], dtype=compute_dtype(sample))
        grad_velocity = torch.ops.unirl.flow_log_prob_backward(
            grad_log_prob, grad_mean, sample, velocity, *others, ctx.rule
        )
    return (None, grad_velocity, *(None for _ in range(8)))


torch.library.register_autograd("unirl::flow_log_prob", _backward, setup_context=_setup_context)
