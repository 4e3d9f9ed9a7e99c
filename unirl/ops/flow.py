# SPDX-License-Identifier: Apache-2.0
"""One stochastic step of a flow-matching sampler, its log-probability, and the replay of both.

Notation: sigma ``s`` falls from 1 to 0, ``x = (1 - s) x0 + s eps``, the model gives ``v = eps - x0``, and
``dt = s' - s < 0``. All rules are linear in x and v: ``mean = cx x + cv v``, ``x' = mean + scale noise``.

* ``flow`` (Flow-GRPO, arXiv:2505.05470): ``std = eta sqrt(s / (1 - s*))`` with ``s* = s``, but the second
  schedule value when s is 1; ``mean = x (1 + std^2 dt / (2 s)) + v (1 + std^2 (1 - s) / (2 s)) dt``,
  ``scale = std sqrt(-dt)``.
* ``dance`` (DanceGRPO, arXiv:2505.07818): the same mean and scale with ``std = eta``.
* ``cps`` (coefficients-preserving sampling, arXiv:2509.05952): ``std = s' sin(eta pi / 2)``,
  ``mean = (x - s v) (1 - s') + (x + (1 - s) v) sqrt(s'^2 - std^2)``, ``scale = std``.

The log-probability is the mean over a row's real elements of the Gaussian log density at ``scale``,
normaliser included; for ``cps`` it is ``-mean((x' - mean)^2)``, without scale, as its authors use it. A step
of scale 0 (``eta`` 0, or the last step of ``cps``) has no density: its log-probability is 0 and belongs in
no ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends
from unirl.ops._reduction import ordered_sum
from unirl.ops.noise import (
    STEP_NOISE_STREAM,
    check_counter,
    check_seed,
    keyed_normal_reference,
    row_keys_tensor,
)

RULES = ("flow", "cps", "dance")
TRAJECTORY_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StepArguments(NamedTuple):
    """Checked row arguments of a step, each float64 ``[N]``; ``lengths`` int64 ``[N]`` or ``None``."""

    sigma: Tensor
    sigma_next: Tensor
    sigma_max: Tensor
    noise_level: Tensor
    lengths: Tensor | None


class StepCoefficients(NamedTuple):
    """Row coefficients of a step, each float64 ``[N]``.

    ``mean = x_factor x + velocity_factor v``; ``log_prob = square_factor mean((x' - mean)^2) + constant``.
    """

    x_factor: Tensor
    velocity_factor: Tensor
    scale: Tensor
    square_factor: Tensor
    constant: Tensor


def flow_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float | Tensor,
    rule: str,
    seed: int,
    row_keys: Tensor | Sequence[str | int],
    step: int,
    trajectory_dtype: torch.dtype = torch.float32,
    lengths: Sequence[int] | Tensor | None = None,
    sigma_max: Tensor | None = None,
    stream: int = STEP_NOISE_STREAM,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step from ``sigma`` to ``sigma_next`` with keyed noise; returns ``(next, log_prob)``.

    The noise is ``keyed_normal(sample.shape, seed=seed, row_keys=row_keys, step=step, stream=stream)``. A
    row with ``eta`` 0 takes the Euler step ``x + v dt`` exactly and draws no noise. A row's bits depend
    neither on its neighbours nor on padding. Not differentiable: see :func:`flow_log_prob`.

    Args:
        sample: x, ``[N, seq, ...]``; arithmetic is float32 (float64 for a float64 sample).
        velocity: v, same shape, any floating dtype.
        sigma: float32 or float64 ``[N]``, in (0, 1].
        sigma_next: ``[N]``, in [0, sigma).
        eta: noise level, a number or ``[N]``; 0 or more (at most 1 for ``cps``).
        rule: ``"flow"``, ``"cps"`` or ``"dance"``.
        seed, row_keys, step, stream: the key of the noise, see :func:`unirl.ops.keyed_normal`.
        trajectory_dtype: dtype of ``next``.
        lengths: real tokens of each row ``[N]`` on axis 1; the rest is left out of the mean and zero in
            ``next``.
        sigma_max: ``[N]``, the second schedule value, used by ``flow`` where sigma is 1; by default
            ``sigma_next``, which it is for a step from the first index to the second.
        backend: ``None`` (picked by device), ``"native"``, ``"triton"`` or ``"reference"``.

    Returns:
        ``next`` in ``trajectory_dtype``, and ``log_prob`` float32 (float64 for a float64 sample) ``[N]`` of
        that rounded value; 0 where the scale is 0.

    Raises:
        ValueError: shapes, dtypes, devices or values outside what is said above.
    """
    rows = _check_step(sample, velocity, sigma, sigma_next, eta, rule, lengths, sigma_max)
    sample, velocity = sample.detach(), velocity.detach()
    arguments.check_choice("trajectory_dtype", trajectory_dtype, TRAJECTORY_DTYPES)
    keys = row_keys_tensor(row_keys, sample.shape[0], sample.device)
    check_counter("step", step)
    check_counter("stream", stream)
    key_words = (check_seed(seed), keys, step, stream, trajectory_dtype)
    if _backends.pick("flow", sample.device, backend) == _backends.REFERENCE:
        return flow_step_reference(sample, velocity, rows, rule, *key_words)
    return torch.ops.unirl.flow_step(sample, velocity, *rows, rule, *key_words)


def flow_log_prob(
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    eta: float | Tensor,
    rule: str,
    lengths: Sequence[int] | Tensor | None = None,
    return_mean: bool = False,
    sigma_max: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Log-probability ``[N]`` of a stored step, differentiable in ``velocity``.

    With the inputs of :func:`flow_step` and its ``next`` it gives that function's ``log_prob`` bit for bit.

    Args:
        sample, velocity, sigma, sigma_next, eta, rule, lengths, sigma_max, backend: as in :func:`flow_step`.
        next_sample: x' as stored, same shape as ``sample``.
        return_mean: return ``(log_prob, mean, scale)`` instead: the mean of x' (padding zero, differentiable
            in ``velocity``) and its standard deviation ``[N]``. The KL of two steps of equal scale is
            ``mean((mean - mean')^2) / (2 scale^2)``.

    Raises:
        ValueError: as in :func:`flow_step`; also when anything but ``velocity`` needs a gradient.
    """
    rows = _check_step(sample, velocity, sigma, sigma_next, eta, rule, lengths, sigma_max)
    arguments.check_tensor("next_sample", next_sample)
    arguments.check_dtype("next_sample", next_sample, arguments.FLOAT_DTYPES)
    arguments.check_shape("next_sample", next_sample, sample.shape, "the shape of sample")
    arguments.check_device("next_sample", next_sample, sample.device, "sample")
    without = {"sample": sample, "next_sample": next_sample, "sigma": sigma, "sigma_next": sigma_next}
    for name, value in (without if sigma_max is None else {**without, "sigma_max": sigma_max}).items():
        arguments.check_no_gradient(name, value)
    if _backends.pick("flow", sample.device, backend) == _backends.REFERENCE:
        outputs = flow_log_prob_reference(sample, velocity, next_sample, rows, rule, return_mean)
    else:
        outputs = torch.ops.unirl.flow_log_prob(sample, velocity, next_sample, *rows, rule, return_mean)
    log_prob, mean, scale = outputs
    return (log_prob, mean, scale.detach()) if return_mean else log_prob


def _check_step(
    sample: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    eta: float | Tensor,
    rule: str,
    lengths: Sequence[int] | Tensor | None,
    sigma_max: Tensor | None,
) -> StepArguments:
    """Check what a step and its replay share."""
    for name, value in (("sample", sample), ("velocity", velocity)):
        arguments.check_tensor(name, value)
        arguments.check_dtype(name, value, arguments.FLOAT_DTYPES)
    if sample.ndim < 2:
        raise ValueError(f"sample has {sample.ndim} axes; expected [N, seq, ...]")
    arguments.check_shape("velocity", velocity, sample.shape, "the shape of sample")
    arguments.check_device("velocity", velocity, sample.device, "sample")
    arguments.check_choice("rule", rule, RULES)
    num_rows = sample.shape[0]
    schedule = [("sigma", sigma), ("sigma_next", sigma_next)]
    if sigma_max is not None:
        schedule.append(("sigma_max", sigma_max))
    for name, value in schedule:
        arguments.check_tensor(name, value)
        arguments.check_dtype(name, value, (torch.float32, torch.float64))
        arguments.check_shape(name, value, (num_rows,), "[N]")
        arguments.check_device(name, value, sample.device, "sample")
    values = {name: value.detach().to(torch.float64) for name, value in schedule}
    level = arguments.row_values("eta", eta, num_rows, sample.device)
    if arguments.is_readable(sample) and num_rows:
        _check_schedule_values(values, level, rule)
    if rule == "cps":
        level = torch.sin(level * (math.pi / 2))
    counts = arguments.token_counts(lengths, num_rows, sample.shape[1], sample.device)
    return StepArguments(
        values["sigma"], values["sigma_next"], values.get("sigma_max", values["sigma_next"]), level, counts
    )


def _check_schedule_values(values: dict[str, Tensor], eta: Tensor, rule: str) -> None:
    """Check values that are on the host (on an accelerator that would wait for it)."""
    sigma, sigma_next = values["sigma"], values["sigma_next"]
    bad = ~((sigma > 0) & (sigma <= 1) & (sigma_next >= 0) & (sigma_next < sigma))
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(
            f"row {row} steps from sigma {float(sigma[row])} to sigma_next {float(sigma_next[row])}; "
            "allowed: 1 >= sigma > sigma_next >= 0"
        )
    if "sigma_max" in values and bool((~((values["sigma_max"] >= 0) & (values["sigma_max"] < 1))).any()):
        raise ValueError("sigma_max must lie in [0, 1): it is the second value of the schedule")
    limit = 1.0 if rule == "cps" else math.inf
    if bool((~((eta >= 0) & (eta <= limit) & eta.isfinite())).any()):
        raise ValueError(f"eta must be finite and lie in [0, {limit}] for rule {rule!r}; got {eta.tolist()}")


def step_coefficients(rows: StepArguments, rule: str) -> StepCoefficients:
    """Row coefficients in float64; the C++ and Triton kernels do the same operations in the same order."""
    sigma, sigma_next, sigma_max, level, _ = rows
    one, zero = torch.ones_like(sigma), torch.zeros_like(sigma)
    dt = sigma_next - sigma
    if rule == "cps":
        scale = sigma_next * level
        kept = torch.sqrt(torch.clamp(sigma_next * sigma_next - scale * scale, min=0.0))
        x_factor = (1.0 - sigma_next) + kept
        velocity_factor = (1.0 - sigma) * kept - sigma * (1.0 - sigma_next)
        square_factor, constant = -one, zero
    else:
        variance = level * level
        if rule == "flow":
            variance = variance * (sigma / (1.0 - torch.where(sigma == 1.0, sigma_max, sigma)))
        x_factor = 1.0 + variance / (2.0 * sigma) * dt
        velocity_factor = (1.0 + variance * (1.0 - sigma) / (2.0 * sigma)) * dt
        scale = torch.sqrt(variance * -dt)
        safe = torch.where(scale > 0, scale, one)
        square_factor = -0.5 / (safe * safe)
        constant = -torch.log(safe) - 0.5 * math.log(2.0 * math.pi)
    euler, no_density = level == 0.0, scale == 0.0
    return StepCoefficients(
        torch.where(euler, one, x_factor),
        torch.where(euler, dt, velocity_factor),
        scale,
        torch.where(no_density, zero, square_factor),
        torch.where(no_density, zero, constant),
    )


def flow_step_reference(
    sample: Tensor,
    velocity: Tensor,
    rows: StepArguments,
    rule: str,
    seed: int,
    keys: Tensor,
    step: int,
    stream: int,
    trajectory_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The plain PyTorch step."""
    compute = compute_dtype(sample)
    coefficients = step_coefficients(rows, rule)
    mean = _mean(sample, velocity, coefficients, rows.lengths)
    noise = keyed_normal_reference(keys, sample.shape, seed, step, stream).to(compute)
    scale = _per_row(coefficients.scale, sample, compute)
    following = torch.where(scale == 0, mean, mean + scale * noise)
    if rows.lengths is not None:
        following = torch.where(arguments.real_token_mask(rows.lengths, sample), following, 0.0)
    following = following.to(trajectory_dtype).contiguous()
    return following, _log_prob(following, mean, coefficients, rows.lengths)


def flow_log_prob_reference(
    sample: Tensor, velocity: Tensor, next_sample: Tensor, rows: StepArguments, rule: str, with_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain PyTorch replay: ``(log_prob, mean, scale)``; ``mean`` is empty unless asked for."""
    coefficients = step_coefficients(rows, rule)
    mean = _mean(sample, velocity, coefficients, rows.lengths)
    log_prob = _log_prob(next_sample, mean, coefficients, rows.lengths)
    scale = coefficients.scale.to(mean.dtype)
    return log_prob, mean.contiguous() if with_mean else mean.new_empty(0), scale


def flow_log_prob_backward_reference(
    grad_log_prob: Tensor,
    grad_mean: Tensor | None,
    sample: Tensor,
    velocity: Tensor,
    next_sample: Tensor,
    rows: StepArguments,
    rule: str,
) -> Tensor:
    """The gradient of ``velocity`` in plain PyTorch, for devices without kernels."""
    with torch.enable_grad():
        leaf = velocity.detach().requires_grad_()
        log_prob, mean, _ = flow_log_prob_reference(sample.detach(), leaf, next_sample, rows, rule, True)
        outputs, upstream = [log_prob], [grad_log_prob]
        if grad_mean is not None:
            outputs, upstream = [log_prob, mean], [grad_log_prob, grad_mean]
        return torch.autograd.grad(outputs, leaf, upstream)[0].contiguous()


def compute_dtype(sample: Tensor) -> torch.dtype:
    """The dtype of the arithmetic and of the log-probability."""
    return torch.float64 if sample.dtype is torch.float64 else torch.float32


def _per_row(values: Tensor, sample: Tensor, dtype: torch.dtype) -> Tensor:
    """Shape row values ``[N]`` for broadcasting over ``sample``."""
    return values.to(dtype).reshape((-1,) + (1,) * (sample.ndim - 1))


def _mean(sample: Tensor, velocity: Tensor, coefficients: StepCoefficients, lengths: Tensor | None) -> Tensor:
    compute = compute_dtype(sample)
    mean = _per_row(coefficients.x_factor, sample, compute) * sample.to(compute)
    mean = mean + _per_row(coefficients.velocity_factor, sample, compute) * velocity.to(compute)
    return mean if lengths is None else torch.where(arguments.real_token_mask(lengths, sample), mean, 0.0)


def _log_prob(
    following: Tensor, mean: Tensor, coefficients: StepCoefficients, lengths: Tensor | None
) -> Tensor:
    difference = following.to(mean.dtype) - mean
    if lengths is not None:
        difference = torch.where(arguments.real_token_mask(lengths, mean), difference, 0.0)
    total = ordered_sum((difference * difference).flatten(1))
    per_token = math.prod(mean.shape[2:])
    if lengths is None:
        count = torch.full_like(total, float(mean.shape[1] * per_token))
    else:
        # Values on an accelerator are not checked, see token_counts.
        count = lengths.clamp(0, mean.shape[1]).to(torch.float64) * per_token
    average = total / torch.clamp(count, min=1.0)
    log_prob = coefficients.square_factor * average + coefficients.constant
    return torch.where(count > 0, log_prob, torch.zeros_like(log_prob)).to(mean.dtype)
