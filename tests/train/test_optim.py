# SPDX-License-Identifier: Apache-2.0
"""AdamW's first steps, warm-up, clipping, masters of low-precision weights, and the average: against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.config import EmaConfig, OptimConfig
from unirl.train.ema import Ema
from unirl.train.optim import Optimizer

PLAIN = OptimConfig(lr=0.1, weight_decay=0.0, max_grad_norm=1e9)


def _one(value: float = 1.0, dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    return {"w": torch.nn.Parameter(torch.tensor([value, value], dtype=dtype))}


def _step(optimizer: Optimizer, *gradients: list[float]):
    """One step with the sum of the gradients, taken one by one as of micro-batches."""
    optimizer.zero_grad()
    parameter = optimizer.parameters["w"]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        optimizer.take_gradients()
    return optimizer.step()


def test_two_steps_by_the_formula_of_adamw():
    config = OptimConfig(lr=0.1, weight_decay=0.5, max_grad_norm=1e9, betas=(0.9, 0.99), eps=1e-8)
    parameters = _one()
    optimizer = Optimizer(parameters, config)
    value, m, v = 1.0, 0.0, 0.0
    for k, g in enumerate((0.3, -0.2), start=1):
        _step(optimizer, [g, g])
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        value -= 0.1 * 0.5 * value
        value -= 0.1 * (m / (1 - 0.9**k)) / (math.sqrt(v / (1 - 0.99**k)) + 1e-8)
        assert parameters["w"].tolist() == pytest.approx([value, value], rel=1e-12)


def test_gradients_of_micros_add_up():
    left, right = _one(), _one()
    _step(Optimizer(left, PLAIN), [0.1, 0.2], [0.3, -0.4])
    _step(Optimizer(right, PLAIN), [0.4, -0.2])
    torch.testing.assert_close(left["w"], right["w"])


def test_warm_up_is_a_line_from_zero():
    optimizer = Optimizer(_one(), OptimConfig(lr=1.0, warmup_steps=4, max_grad_norm=1.0))
    assert [_step(optimizer, [1.0, 0.0]).lr for _ in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert _step(Optimizer(_one(), PLAIN), [1.0, 0.0]).lr == 0.1


def test_norm_is_reported_before_clipping_and_clipped_to_the_bound():
    optimizer = Optimizer(_one(), OptimConfig(max_grad_norm=1.0))
    assert _step(optimizer, [3.0, 4.0]).grad_norm == 5.0
    torch.testing.assert_close(optimizer.flat_gradient, torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert _step(optimizer, [0.3, 0.4]).grad_norm == 0.5
    torch.testing.assert_close(optimizer.flat_gradient, torch.tensor([0.3, 0.4], dtype=torch.float64))


def test_norm_of_large_finite_gradients_does_not_overflow():
    report = _step(Optimizer(_one(dtype=torch.float32), OptimConfig(max_grad_norm=1.0)), [3e30, 4e30])
    assert report.grad_norm == pytest.approx(5e30) and not report.skipped


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_gradient_skips_the_step_and_does_not_advance_the_warm_up(bad):
    parameters = _one()
    optimizer = Optimizer(parameters, OptimConfig(lr=1.0, warmup_steps=4))
    _step(optimizer, [0.1, 0.1])
    before = {n: t.clone() for n, t in optimizer.state_tensors().items()} | {
        "w": parameters["w"].detach().clone()
    }
    report = _step(optimizer, [bad, 0.1])
    assert report.skipped and (optimizer.steps_taken, optimizer.steps_skipped) == (1, 1)
    after = {**optimizer.state_tensors(), "w": parameters["w"].detach()}
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert _step(optimizer, [0.1, 0.1]).lr == 0.5


def test_small_steps_of_bfloat16_weights_are_not_lost():
    parameters = _one(dtype=torch.bfloat16)
    optimizer = Optimizer(parameters, OptimConfig(lr=1e-4, weight_decay=0.0))
    for _ in range(100):
        _step(optimizer, [0.5, 0.5])
    # Adam's steps of a constant gradient are lr each; one of 1e-4 is far below bfloat16's spacing at 1 (.0039).
    assert optimizer.masters["w"].tolist() == pytest.approx([0.99, 0.99], abs=1e-5)
    assert torch.equal(parameters["w"].detach(), optimizer.masters["w"].detach().bfloat16())
    assert parameters["w"].tolist() != [1.0, 1.0]


def test_weight_that_takes_no_part_stays_what_it_is():
    parameters = {**_one(), "idle": torch.nn.Parameter(torch.ones(3, dtype=torch.float64))}
    optimizer = Optimizer(parameters, OptimConfig(lr=0.1, weight_decay=0.5))
    _step(optimizer, [0.1, 0.1])
    assert parameters["idle"].tolist() == [1.0] * 3 and parameters["w"][0] < 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_state_goes_on_as_if_nothing_had_happened(dtype):
    config = OptimConfig(lr=0.01, warmup_steps=7)
    whole, half = _one(dtype=dtype), _one(dtype=dtype)
    gradients = [[0.1 * math.sin(i), 0.2 * math.cos(i)] for i in range(10)]
    left = Optimizer(whole, config)
    for g in gradients:
        _step(left, g)
    first = Optimizer(half, config)
    for g in gradients[:5]:
        _step(first, g)
    tensors = {n: t.clone() for n, t in first.state_tensors().items()}
    fresh = {"w": torch.nn.Parameter(half["w"].detach().clone())}
    second = Optimizer(fresh, config)
    second.load(tensors, first.state_counts())
    for g in gradients[5:]:
        _step(second, g)
    assert torch.equal(whole["w"], fresh["w"]) and left.state_counts() == second.state_counts()
    assert all(torch.equal(t, second.state_tensors()[n]) for n, t in left.state_tensors().items())


def test_state_of_other_weights_is_refused():
    with pytest.raises(ValueError, match=r"other weights.*v:exp_avg"):
        Optimizer(_one(), PLAIN).load({"v:exp_avg": torch.zeros(2)}, {"steps_taken": 0, "steps_skipped": 0})


def test_average_follows_its_formula():
    weights = {"w": torch.tensor([0.0])}
    ema = Ema(weights, EmaConfig(decay=0.5, warmup=False))
    for value, expected in ((1.0, 0.5), (1.0, 0.75), (0.0, 0.375)):
        ema.update({"w": torch.tensor([value])})
        assert ema.tensors["w"].tolist() == [expected]


def test_average_warms_up():
    ema = Ema({"w": torch.tensor([0.0])}, EmaConfig(decay=0.4, warmup=True))
    decays = []
    for _ in range(8):
        decays.append(ema.decay())
        ema.update({"w": torch.tensor([1.0])})
    assert decays == [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 0.4, 0.4]


def test_average_of_low_precision_weights_is_float32_and_resumes():
    weights = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    ema = Ema(weights, EmaConfig(decay=0.999, warmup=False))
    ema.update({"w": torch.tensor([2.0], dtype=torch.bfloat16)})
    assert ema.tensors["w"].dtype is torch.float32 and ema.tensors["w"].item() == pytest.approx(1.001)
    other = Ema(weights, EmaConfig(decay=0.999, warmup=False))
    other.load({"w": ema.tensors["w"].clone()}, ema.num_updates)
    assert other.num_updates == 1 and torch.equal(other.tensors["w"], ema.tensors["w"])
    with pytest.raises(ValueError, match="other weights"):
        other.load({"v": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match=r"optim\.ema\.decay is 0"):
        Ema(weights, EmaConfig(decay=0.0))
