# SPDX-License-Identifier: Apache-2.0
"""The flow step, its log-probability and the replay's gradient on the GPU; formulas in :mod:`unirl.ops.flow`.

A row is cut into chunks of fixed size, one program each, whose sums of squares are written to ``[N, chunks]`` and
added in order by a second kernel: no atomics, and trailing (padding) chunks add exact zeros, so that a row's bits
depend neither on its neighbours nor on its padding.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl.ops import _native
from unirl.ops.flow import RULES, StepArguments, compute_dtype
from unirl.ops.triton import on_device_of_first
from unirl.ops.triton.noise import noise_chunk, noise_key

CHUNK = 1024
FINISH_BLOCK = 128


@triton.jit
def _coefficients(row, sigma_of, sigma_next_of, sigma_max_of, level_of, RULE: tl.constexpr):
    """``step_coefficients`` of :mod:`unirl.ops.flow`, scalars in float64."""
    sigma = tl.load(sigma_of + row)
    sigma_next = tl.load(sigma_next_of + row)
    level = tl.load(level_of + row)
    dt = sigma_next - sigma
    if RULE == 1:
        scale = sigma_next * level
        kept = tl.sqrt(tl.maximum(sigma_next * sigma_next - scale * scale, 0.0))
        x_factor = (1.0 - sigma_next) + kept
        velocity_factor = (1.0 - sigma) * kept - sigma * (1.0 - sigma_next)
        square_factor = sigma * 0.0 - 1.0
        constant = sigma * 0.0
    else:
        variance = level * level
        if RULE == 0:
            star = tl.where(sigma == 1.0, tl.load(sigma_max_of + row), sigma)
            variance = variance * (sigma / (1.0 - star))
        x_factor = 1.0 + variance / (2.0 * sigma) * dt
        velocity_factor = (1.0 + variance * (1.0 - sigma) / (2.0 * sigma)) * dt
        scale = tl.sqrt(variance * -dt)
        safe = tl.where(scale > 0.0, scale, 1.0)
        square_factor = -0.5 / (safe * safe)
        constant = -tl.log(safe) - 0.9189385332046727
    euler = level == 0.0
    no_density = scale == 0.0
    x_factor = tl.where(euler, 1.0, x_factor)
    velocity_factor = tl.where(euler, dt, velocity_factor)
    square_factor = tl.where(no_density, 0.0, square_factor)
    constant = tl.where(no_density, 0.0, constant)
    return x_factor, velocity_factor, scale, square_factor, constant


@triton.jit
def _real_elements(row, lengths, seq, per_token, HAS_LENGTHS: tl.constexpr):
    tokens = tl.cast(seq, tl.int64)
    if HAS_LENGTHS:
        tokens = tl.maximum(tl.minimum(tl.load(lengths + row), tokens), 0)
    return tokens * per_token


@triton.jit
def _mean(sample, velocity, x_factor, velocity_factor, element, mask, COMPUTE: tl.constexpr):
    x = tl.load(sample + element, mask=mask, other=0.0).to(COMPUTE)
    v = tl.load(velocity + element, mask=mask, other=0.0).to(COMPUTE)
    return x_factor.to(COMPUTE) * x + velocity_factor.to(COMPUTE) * v


@triton.jit(do_not_specialize=["seed", "step", "stream"])
def _step_kernel(
    sample,
    velocity,
    following,
    partial,
    sigma_of,
    sigma_next_of,
    sigma_max_of,
    level_of,
    lengths,
    keys,
    seed,
    step,
    stream,
    sample_stride,
    velocity_stride,
    row_size,
    seq,
    per_token,
    chunks,
    RULE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    x_factor, velocity_factor, scale64, _, _ = _coefficients(
        row, sigma_of, sigma_next_of, sigma_max_of, level_of, RULE
    )
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    real = element < _real_elements(row, lengths, seq, per_token, HAS_LENGTHS)
    mean = _mean(
        sample + row * sample_stride,
        velocity + row * velocity_stride,
        x_factor,
        velocity_factor,
        element,
        real,
        COMPUTE,
    )
    scale = scale64.to(COMPUTE)
    noise = noise_chunk(noise_key(seed, tl.load(keys + row)), chunk, step, stream, CHUNK).to(COMPUTE)
    moved = tl.where(scale == 0.0, mean, mean + scale * noise)
    stored = tl.where(real, moved, 0.0).to(following.dtype.element_ty)
    tl.store(following + row * row_size + element, stored, mask=element < row_size)
    difference = tl.where(real, stored.to(COMPUTE) - mean, 0.0)
    tl.store(partial + program, tl.sum(difference * difference, axis=0).to(tl.float64))


@triton.jit
def _replay_kernel(
    sample,
    velocity,
    following,
    mean_out,
    partial,
    sigma_of,
    sigma_next_of,
    sigma_max_of,
    level_of,
    lengths,
    sample_stride,
    velocity_stride,
    following_stride,
    row_size,
    seq,
    per_token,
    chunks,
    RULE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    x_factor, velocity_factor, _, _, _ = _coefficients(
        row, sigma_of, sigma_next_of, sigma_max_of, level_of, RULE
    )
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    real = element < _real_elements(row, lengths, seq, per_token, HAS_LENGTHS)
    mean = _mean(
        sample + row * sample_stride,
        velocity + row * velocity_stride,
        x_factor,
        velocity_factor,
        element,
        real,
        COMPUTE,
    )
    if WITH_MEAN:
        tl.store(mean_out + row * row_size + element, mean, mask=element < row_size)
    stored = tl.load(following + row * following_stride + element, mask=real, other=0.0).to(COMPUTE)
    difference = tl.where(real, stored - mean, 0.0)
    tl.store(partial + program, tl.sum(difference * difference, axis=0).to(tl.float64))


@triton.jit
def _finish_kernel(
    partial,
    log_prob,
    scale_out,
    sigma_of,
    sigma_next_of,
    sigma_max_of,
    level_of,
    lengths,
    row_size,
    seq,
    per_token,
    chunks,
    RULE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    WITH_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, _, scale, square_factor, constant = _coefficients(
        row, sigma_of, sigma_next_of, sigma_max_of, level_of, RULE
    )
    total = scale * 0.0
    for start in range(0, chunks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        block = tl.load(partial + row * chunks + index, mask=index < chunks, other=0.0)
        total += tl.sum(block, axis=0)
    count = _real_elements(row, lengths, seq, per_token, HAS_LENGTHS).to(tl.float64)
    value = square_factor * (total / tl.maximum(count, 1.0)) + constant
    tl.store(log_prob + row, tl.where(count > 0.0, value, 0.0).to(log_prob.dtype.element_ty))
    if WITH_SCALE:
        tl.store(scale_out + row, scale.to(scale_out.dtype.element_ty))


@triton.jit
def _gradient_kernel(
    grad_log_prob,
    grad_mean,
    sample,
    velocity,
    following,
    grad_velocity,
    sigma_of,
    sigma_next_of,
    sigma_max_of,
    level_of,
    lengths,
    grad_mean_stride,
    sample_stride,
    velocity_stride,
    following_stride,
    row_size,
    seq,
    per_token,
    chunks,
    RULE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
    HAS_GRAD_MEAN: tl.constexpr,
    COMPUTE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    x_factor, velocity_factor, _, square_factor, _ = _coefficients(
        row, sigma_of, sigma_next_of, sigma_max_of, level_of, RULE
    )
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    count = _real_elements(row, lengths, seq, per_token, HAS_LENGTHS)
    real = element < count
    mean = _mean(
        sample + row * sample_stride,
        velocity + row * velocity_stride,
        x_factor,
        velocity_factor,
        element,
        real,
        COMPUTE,
    )
    stored = tl.load(following + row * following_stride + element, mask=real, other=0.0).to(COMPUTE)
    upstream = tl.load(grad_log_prob + row).to(tl.float64)
    factor = -2.0 * square_factor * upstream / tl.maximum(count, 1).to(tl.float64)
    grad = factor.to(COMPUTE) * (stored - mean)
    if HAS_GRAD_MEAN:
        grad += tl.load(grad_mean + row * grad_mean_stride + element, mask=real, other=0.0).to(COMPUTE)
    grad = tl.where(real, velocity_factor.to(COMPUTE) * grad, 0.0)
    tl.store(
        grad_velocity + row * row_size + element,
        grad.to(grad_velocity.dtype.element_ty),
        mask=element < row_size,
    )


class _Launch:
    """What the kernels of one call share; it keeps the row tensors alive."""

    def __init__(self, sample: Tensor, rows: StepArguments, rule: str) -> None:
        sigma, sigma_next, sigma_max, level, lengths = (
            value if value is None else value.contiguous() for value in rows
        )
        # A kernel without lengths gets some pointer that it never reads.
        self.per_row = (sigma, sigma_next, sigma_max, level, sigma if lengths is None else lengths)
        self.num_rows, self.seq = sample.shape[:2]
        self.per_token = math.prod(sample.shape[2:])
        self.chunks = max(1, triton.cdiv(self.seq * self.per_token, CHUNK))
        self.grid = (self.num_rows * self.chunks,)
        self.sizes = (self.seq * self.per_token, self.seq, self.per_token, self.chunks)
        self.dtype = compute_dtype(sample)
        self.options = {"RULE": RULES.index(rule), "HAS_LENGTHS": lengths is not None}
        self.chunk_options = {
            **self.options,
            "COMPUTE": tl.float64 if self.dtype is torch.float64 else tl.float32,
            "CHUNK": CHUNK,
            "num_warps": 4,
            "enable_fp_fusion": False,
        }
        self.partial = torch.empty(self.grid, dtype=torch.float64, device=sample.device)
        self.log_prob = torch.empty(self.num_rows, dtype=self.dtype, device=sample.device)
        self.scale = torch.empty(self.num_rows, dtype=self.dtype, device=sample.device)

    def finish(self, with_scale: bool) -> None:
        _finish_kernel[(self.num_rows,)](
            self.partial,
            self.log_prob,
            self.scale,
            *self.per_row,
            *self.sizes,
            **self.options,
            WITH_SCALE=with_scale,
            BLOCK=FINISH_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )


@on_device_of_first
def flow_step(
    sample: Tensor,
    velocity: Tensor,
    rows: StepArguments,
    rule: str,
    seed: int,
    row_keys: Tensor,
    step: int,
    stream: int,
    trajectory_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """``(next, log_prob)``; arguments as checked by :func:`unirl.ops.flow_step`."""
    launch = _Launch(sample, rows, rule)
    following = torch.empty(sample.shape, dtype=trajectory_dtype, device=sample.device)
    if launch.num_rows == 0:
        return following, launch.log_prob
    x, v, keys = _native.contiguous_rows(sample), _native.contiguous_rows(velocity), row_keys.contiguous()
    _step_kernel[launch.grid](
        x,
        v,
        following,
        launch.partial,
        *launch.per_row,
        keys,
        seed,
        step,
        stream,
        x.stride(0),
        v.stride(0),
        *launch.sizes,
        **launch.chunk_options,
    )
    launch.finish(with_scale=False)
    return following, launch.log_prob


@on_device_of_first
def flow_log_prob(
    sample: Tensor, velocity: Tensor, next_sample: Tensor, rows: StepArguments, rule: str, with_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``(log_prob, mean, scale)``; ``mean`` is empty unless asked for."""
    launch = _Launch(sample, rows, rule)
    mean = torch.empty(sample.shape if with_mean else (0,), dtype=launch.dtype, device=sample.device)
    if launch.num_rows == 0:
        return launch.log_prob, mean, launch.scale
    x, v, y = (_native.contiguous_rows(tensor) for tensor in (sample, velocity, next_sample))
    _replay_kernel[launch.grid](
        x,
        v,
        y,
        mean,
        launch.partial,
        *launch.per_row,
        x.stride(0),
        v.stride(0),
        y.stride(0),
        *launch.sizes,
        WITH_MEAN=with_mean,
        **launch.chunk_options,
    )
    launch.finish(with_scale=True)
    return launch.log_prob, mean, launch.scale


@on_device_of_first
def flow_log_prob_backward(
    grad_log_prob: Tensor,
    grad_mean: Tensor | None,
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    rows: StepArguments,
    rule: str,
) -> Tensor:
    """The gradient of ``velocity``, in one pass over the inputs."""
    grad_velocity = torch.empty(velocity.shape, dtype=velocity.dtype, device=velocity.device)
    if grad_velocity.numel() == 0:
        return grad_velocity
    launch = _Launch(sample, rows, rule)
    x, v, y = (_native.contiguous_rows(tensor) for tensor in (sample, velocity, next_sample))
    upstream_mean = x if grad_mean is None else _native.contiguous_rows(grad_mean)
    _gradient_kernel[launch.grid](
        grad_log_prob.contiguous(),
        upstream_mean,
        x,
        v,
        y,
        grad_velocity,
        *launch.per_row,
        upstream_mean.stride(0),
        x.stride(0),
        v.stride(0),
        y.stride(0),
        *launch.sizes,
        HAS_GRAD_MEAN=grad_mean is not None,
        **launch.chunk_options,
    )
    return grad_velocity
