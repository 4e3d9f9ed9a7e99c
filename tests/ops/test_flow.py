# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.ops import flow_log_prob, flow_step, keyed_normal

BACKENDS = ("native", "reference")
RULES = ("flow", "cps", "dance")


def schedule(steps: int, shift: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return (shift * t / (1 + (shift - 1) * t)).to(dtype)


def step_in_float64(
    x: Tensor, v: Tensor, s: float, s_next: float, eta: float, rule: str, s_max: float | None = None
) -> tuple[Tensor, float]:
    """Mean and noise scale, written from the papers' formulas, with s, s' and dt as they have them."""
    x, v = x.double(), v.double()
    dt = s_next - s
    if rule == "cps":
        std = s_next * math.sin(eta * math.pi / 2)
        x0, eps = x - s * v, x + (1 - s) * v
        return x0 * (1 - s_next) + eps * math.sqrt(max(s_next**2 - std**2, 0)), std
    star = (s_next if s_max is None else s_max) if s == 1 else s
    std = eta * math.sqrt(s / (1 - star)) if rule == "flow" else eta
    mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
    return mean, std * math.sqrt(-dt)


def log_prob_in_float64(x: Tensor, mean: Tensor, scale: float, rule: str) -> float:
    if scale == 0:
        return 0.0
    if rule == "cps":
        return float(-((x.double() - mean) ** 2).mean())
    return float(torch.distributions.Normal(mean, scale).log_prob(x.double()).mean())


def random_step(rows: int = 10, seq: int = 5, channels: int = 3, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, seq, channels, generator=generator).to(dtype)
    v = torch.randn(rows, seq, channels, generator=generator).to(dtype)
    s = schedule(rows)
    return x, v, s[:-1], s[1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_scale_of_the_flow_rule_on_ten_steps_of_shift_three(backend: str) -> None:
    x, v, sigma, sigma_next = random_step()
    _, _, scale = flow_log_prob(
        x, v, x, sigma, sigma_next, eta=0.7, rule="flow", return_mean=True, backend=backend
    )
    expected = [0.7, 0.7384, 0.5317, 0.4415, 0.3877, 0.35, 0.3195, 0.2905, 0.2562, 0.2021]
    torch.testing.assert_close(scale, torch.tensor(expected), rtol=0, atol=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_standard_deviation_of_the_cps_rule_and_its_preserved_coefficient(backend: str) -> None:
    x, _, sigma, sigma_next = random_step(dtype=torch.float64)
    eps = torch.ones_like(x)
    x0 = torch.zeros_like(x)
    noisy = sigma.reshape(-1, 1, 1) * eps
    _, mean, scale = flow_log_prob(
        noisy, eps - x0, noisy, sigma, sigma_next, eta=0.7, rule="cps", return_mean=True, backend=backend
    )
    expected = [0.8592, 0.8225, 0.7796, 0.7290, 0.6683, 0.5940, 0.5012, 0.3819, 0.2228, 0]
    torch.testing.assert_close(scale, torch.tensor(expected).double(), rtol=0, atol=5e-5)
    # With x0 = 0 and eps = 1 the mean is the coefficient of eps.
    torch.testing.assert_close(scale**2 + mean[:, 0, 0] ** 2, sigma_next**2, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_and_log_prob_follow_the_formulas(rule: str, dtype: torch.dtype, backend: str) -> None:
    x, v, sigma, sigma_next = random_step(dtype=dtype)
    noise_key = {"seed": 5, "row_keys": list(range(10)), "step": 3}
    eta = 0.7
    following, log_prob = flow_step(
        x,
        v,
        sigma,
        sigma_next,
        eta=eta,
        rule=rule,
        trajectory_dtype=dtype,
        stream=4,
        backend=backend,
        **noise_key,
    )
    noise = keyed_normal(x.shape, stream=4, **noise_key).double()
    tolerance = 2e-6 if dtype is torch.float32 else 1e-14
    for row in range(10):
        mean, scale = step_in_float64(x[row], v[row], float(sigma[row]), float(sigma_next[row]), eta, rule)
        torch.testing.assert_close(
            following[row].double(), mean + scale * noise[row], rtol=tolerance, atol=tolerance
        )
        expected = log_prob_in_float64(following[row], mean, scale, rule)
        assert float(log_prob[row]) == pytest.approx(expected, rel=20 * tolerance, abs=20 * tolerance)
    replayed = flow_log_prob(x, v, following, sigma, sigma_next, eta=eta, rule=rule, backend=backend)
    assert torch.equal(replayed, log_prob)  # the same bits in sampling and in replay


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_eta_zero_is_the_euler_step_and_draws_no_noise(rule: str, backend: str) -> None:
    x, v, sigma, sigma_next = random_step(dtype=torch.float64)
    results = [
        flow_step(
            x,
            v,
            sigma,
            sigma_next,
            eta=0.0,
            rule=rule,
            seed=seed,
            row_keys=list(range(10)),
            step=0,
            trajectory_dtype=torch.float64,
            backend=backend,
        )
        for seed in (0, 1)
    ]
    euler = x + v * (sigma_next - sigma).reshape(-1, 1, 1)
    assert torch.equal(results[0][0], results[1][0])
    assert float((results[0][0] - euler).abs().max()) <= 1e-15
    assert float(results[0][1].abs().max()) == 0


@pytest.mark.parametrize("rule", RULES)
def test_exact_velocity_of_a_gaussian_ends_at_the_discretised_deviation(rule: str) -> None:
    # Data N(0, .5^2): x_s ~ N(0, (1-s)^2/4 + s^2), whose exact velocity is linear in x.
    sigmas = schedule(50, shift=1.0)
    deviation = torch.ones(1, dtype=torch.float64).reshape(1, 1, 1)
    for index in range(50):
        s, s_next = sigmas[index], sigmas[index + 1]
        variance = (1 - s) ** 2 * 0.25 + s**2
        velocity = deviation * (s - (1 - s) * 0.25) / variance
        deviation, _ = flow_step(
            deviation,
            velocity,
            s.reshape(1),
            s_next.reshape(1),
            eta=0.0,
            rule=rule,
            seed=0,
            row_keys=[0],
            step=index,
            trajectory_dtype=torch.float64,
        )
    assert float(deviation) == pytest.approx(0.4854, abs=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [1, 2])
def test_one_and_two_step_schedules_stay_finite(rule: str, steps: int, backend: str) -> None:
    sigmas = schedule(steps)
    for index in range(steps):
        following, log_prob = flow_step(
            torch.randn(1, 4, 2),
            torch.randn(1, 4, 2),
            sigmas[index : index + 1],
            sigmas[index + 1 : index + 2],
            eta=1.0,
            rule=rule,
            seed=0,
            row_keys=[0],
            step=index,
            backend=backend,
        )
        assert bool(following.isfinite().all()) and bool(log_prob.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_sigma_max_replaces_the_denominator_at_one_only(backend: str) -> None:
    sigma = torch.tensor([1.0, 0.9])
    sigma_next = torch.tensor([0.5, 0.5])
    x = torch.zeros(2, 1, 1)
    _, _, scale = flow_log_prob(
        x,
        x,
        x,
        sigma,
        sigma_next,
        eta=1.0,
        rule="flow",
        sigma_max=torch.tensor([0.75, 0.75]),
        return_mean=True,
        backend=backend,
    )
    expected = [math.sqrt(1 / 0.25) * math.sqrt(0.5), math.sqrt(0.9 / 0.1) * math.sqrt(0.4)]
    torch.testing.assert_close(scale, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_step_of_cps_has_no_density(backend: str) -> None:
    x, v = torch.randn(1, 4, 2), torch.randn(1, 4, 2)
    sigma, sigma_next = torch.tensor([0.25]), torch.tensor([0.0])
    following, log_prob = flow_step(
        x,
        v,
        sigma,
        sigma_next,
        eta=0.7,
        rule="cps",
        seed=0,
        row_keys=[1],
        step=9,
        trajectory_dtype=torch.bfloat16,
        backend=backend,
    )
    torch.testing.assert_close(following, (x - 0.25 * v).bfloat16())
    assert float(log_prob) == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_prob_after_the_storage_round_trip_is_unbiased(backend: str) -> None:
    # Latents stored in bfloat16: replay from what was stored gives ratio 1, without bias.
    x, v = torch.randn(4, 1024, 64), torch.randn(4, 1024, 64)
    sigma, sigma_next = torch.full((4,), 0.5), torch.full((4,), 0.4975)
    arguments = {"eta": 1.0, "rule": "dance", "backend": backend}
    following, log_prob = flow_step(
        x,
        v,
        sigma,
        sigma_next,
        seed=0,
        row_keys=[0, 1, 2, 3],
        step=0,
        trajectory_dtype=torch.bfloat16,
        **arguments,
    )
    assert following.dtype is torch.bfloat16
    replayed = flow_log_prob(x, v, following, sigma, sigma_next, **arguments)
    assert torch.equal(torch.exp(replayed - log_prob), torch.ones(4))


@pytest.mark.parametrize("tokens", [1024, 2304, 4096])
def test_mean_over_elements_does_not_grow_with_the_canvas(tokens: int) -> None:
    x = torch.zeros(1, tokens, 64)
    sigma, sigma_next = torch.tensor([0.5]), torch.tensor([0.25])
    # Scale .5; a value one scale off, and one a bit further by a log-ratio of -1e-5 an element.
    values = [torch.full_like(x, distance * 0.5) for distance in (1.0, math.sqrt(1 + 2e-5))]
    near, far = (flow_log_prob(x, x, value, sigma, sigma_next, eta=1.0, rule="dance") for value in values)
    assert float(torch.exp(far - near)) == pytest.approx(0.99999, abs=2e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("trajectory_dtype", [torch.float32, torch.bfloat16])
def test_padding_leaves_every_bit_of_a_row(rule: str, trajectory_dtype: torch.dtype, backend: str) -> None:
    lengths = [1, 7, 16, 33, 60]
    x, v, sigma, sigma_next = random_step(5, 60, 11)
    keys = [f"r0.p0/{index}" for index in range(5)]
    arguments = {"eta": 0.7, "rule": rule, "seed": 2, "step": 1, "backend": backend}

    def run(rows: slice, size: int, counts: list[int] | None) -> list[Tensor]:
        inputs = [x[rows, :size].clone(), v[rows, :size].clone().requires_grad_()]
        if counts is not None:
            for row, count in enumerate(counts):
                inputs[0][row, count:] = torch.nan  # padding may hold anything
        following, log_prob = flow_step(
            inputs[0],
            inputs[1].detach(),
            sigma[rows],
            sigma_next[rows],
            row_keys=keys[rows],
            trajectory_dtype=trajectory_dtype,
            lengths=counts,
            **arguments,
        )
        replayed, mean, _ = flow_log_prob(
            inputs[0],
            inputs[1],
            following,
            sigma[rows],
            sigma_next[rows],
            eta=0.7,
            rule=rule,
            lengths=counts,
            return_mean=True,
            backend=backend,
        )
        assert torch.equal(replayed.detach(), log_prob)
        (grad,) = torch.autograd.grad(replayed.sum() + (mean**2).sum(), inputs[1])
        return [following, log_prob, mean.detach(), grad]

    padded = run(slice(0, 5), 60, lengths)
    for row, length in enumerate(lengths):
        alone = run(slice(row, row + 1), length, None)
        for whole, single in zip(padded, alone, strict=True):
            if whole.ndim == 1:
                assert torch.equal(whole[row], single[0])
            else:
                assert torch.equal(whole[row, :length], single[0])
                assert float(whole[row, length:].abs().sum()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_alone_and_in_a_batch_has_the_same_bits(backend: str) -> None:
    x, v, sigma, sigma_next = random_step(8, 40, 16)
    keys = list(range(8))
    eta = torch.tensor([0.7, 0.0, 0.3, 1.0, 0.0, 0.7, 0.7, 0.2])

    def step(rows: list[int]) -> tuple[Tensor, Tensor]:
        return flow_step(
            x[rows],
            v[rows],
            sigma[rows],
            sigma_next[rows],
            eta=eta[rows],
            rule="flow",
            seed=0,
            row_keys=[keys[row] for row in rows],
            step=0,
            backend=backend,
        )

    batch = step(list(range(8)))
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    permuted = step(order)
    assert torch.equal(permuted[0], batch[0][order]) and torch.equal(permuted[1], batch[1][order])
    for row in range(8):
        alone = step([row])
        assert torch.equal(alone[0][0], batch[0][row]) and torch.equal(alone[1][0], batch[1][row])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 4),
    seq=st.integers(0, 9),
    trailing=st.lists(st.integers(0, 40), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    velocity_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    trajectory_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    rule=st.sampled_from(RULES),
    ragged=st.booleans(),
    strided=st.booleans(),
)
def test_native_step_and_gradient_equal_the_reference(
    rows: int,
    seq: int,
    trailing: list[int],
    dtype: torch.dtype,
    velocity_dtype: torch.dtype,
    trajectory_dtype: torch.dtype,
    rule: str,
    ragged: bool,
    strided: bool,
) -> None:
    generator = torch.Generator().manual_seed(seq)
    shape = (rows, seq, *trailing)
    x = torch.randn(shape, generator=generator).to(dtype)
    v = torch.randn(shape, generator=generator).to(velocity_dtype)
    if strided:
        x = torch.stack([x, x], dim=-1)[..., 0]
        v = v.transpose(0, 1).contiguous().transpose(0, 1)
    sigma = torch.rand(rows, generator=generator, dtype=torch.float64) * 0.9 + 0.1
    sigma[:1] = 1.0
    sigma_next = sigma * torch.rand(rows, generator=generator, dtype=torch.float64) * 0.95
    lengths = torch.randint(0, seq + 1, (rows,), generator=generator) if ragged else None
    common = {"eta": 0.6, "rule": rule, "lengths": lengths}
    noise_key = {"seed": 1, "row_keys": list(range(rows)), "step": 0}
    results = []
    for backend in BACKENDS:
        following, log_prob = flow_step(
            x, v, sigma, sigma_next, trajectory_dtype=trajectory_dtype, backend=backend, **common, **noise_key
        )
        leaf = v.detach().requires_grad_()
        outputs = flow_log_prob(
            x, leaf, following, sigma, sigma_next, return_mean=True, backend=backend, **common
        )
        loss = (outputs[0] * torch.arange(1.0, rows + 1)).sum() + (outputs[1].double() ** 2).sum()
        (grad,) = torch.autograd.grad(loss, leaf)
        results.append((following, log_prob, *(part.detach() for part in outputs), grad))
    exact = dtype is not torch.float64
    for native, reference in zip(*results, strict=True):
        assert native.dtype is reference.dtype and native.shape == reference.shape
        if exact and native is not results[0][-1]:
            assert torch.equal(native, reference)
        else:
            wide = native.dtype in (torch.float32, torch.float64)
            torch.testing.assert_close(native, reference, **({} if wide else {"rtol": 2e-2, "atol": 2e-2}))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_gradient_in_float64(rule: str, backend: str) -> None:
    x, v, sigma, sigma_next = random_step(4, 3, 2, torch.float64)
    following = torch.randn_like(x)

    def function(velocity: Tensor) -> tuple[Tensor, Tensor]:
        outputs = flow_log_prob(
            x,
            velocity,
            following,
            sigma,
            sigma_next,
            eta=0.7,
            rule=rule,
            lengths=[3, 2, 0, 1],
            return_mean=True,
            backend=backend,
        )
        return outputs[0], outputs[1]

    assert torch.autograd.gradcheck(function, (v.requires_grad_(),), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", ["flow", "dance"])
def test_kl_of_equal_scales_is_the_squared_distance_of_the_means(rule: str) -> None:
    x, v, sigma, sigma_next = random_step(4, 3, 2, torch.float64)
    other = v + 0.1
    outputs = [
        flow_log_prob(x, u, x, sigma, sigma_next, eta=0.7, rule=rule, return_mean=True) for u in (v, other)
    ]
    (_, mean, scale), (_, other_mean, other_scale) = outputs
    assert torch.equal(scale, other_scale)
    formula = ((mean - other_mean) ** 2).flatten(1).mean(1) / (2 * scale**2)
    wide = scale.reshape(-1, 1, 1)
    exact = torch.distributions.kl_divergence(
        torch.distributions.Normal(mean, wide), torch.distributions.Normal(other_mean, wide)
    )
    torch.testing.assert_close(formula, exact.flatten(1).mean(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "euler"}, "rule is 'euler'; allowed: 'flow', 'cps', 'dance'"),
        ({"eta": -0.1}, "eta must be finite"),
        ({"eta": 1.5, "rule": "cps"}, r"lie in \[0, 1.0\] for rule 'cps'"),
        ({"eta": torch.ones(3)}, "eta has shape"),
        ({"sigma": torch.tensor([0.5, 1.5])}, "row 1 steps from sigma 1.5"),
        ({"sigma_next": torch.tensor([0.9, 0.1])}, "row 0 steps from sigma 0.5"),
        ({"sigma": torch.tensor([0.5, torch.nan])}, "row 1 steps from sigma nan"),
        ({"sigma": torch.tensor([1, 1])}, "sigma has dtype int64"),
        ({"sigma_max": torch.tensor([1.0, 1.0])}, "sigma_max must lie in"),
        ({"velocity": torch.zeros(2, 4, 3)}, "velocity has shape"),
        ({"velocity": torch.zeros(2, 4, 2, dtype=torch.int64)}, "velocity has dtype int64"),
        ({"lengths": [5, 1]}, "lengths holds 5"),
        ({"lengths": [1]}, "lengths has shape"),
        ({"trajectory_dtype": torch.int8}, "trajectory_dtype is"),
        ({"row_keys": ["a"]}, "row_keys has shape"),
        ({"row_keys": [0.1, 0.2]}, "a row key is 0.1; allowed: an integer"),
        ({"eta": math.nan}, "eta is nan; it must be finite"),
        ({"eta": torch.tensor([0.7, torch.inf])}, "eta is inf in row 1"),
        ({"sigma": [0.5, 0.5]}, "sigma must be a torch.Tensor, got list"),
        ({"sigma": torch.tensor(0.5)}, "sigma has shape"),
        ({"sigma": torch.full((2,), 0.5, device="meta")}, "sigma is on meta, sample is on cpu"),
        ({"sample": torch.zeros(2)}, "sample has 1 axes"),
        ({"sample": torch.zeros(2, 4, 2).to_sparse()}, "sample must be a strided tensor"),
        ({"lengths": [1.5, 2]}, "a value of lengths is 1.5"),
        ({"lengths": [-1, 2]}, "lengths holds -1; allowed: 0 to 4 tokens"),
        ({"lengths": torch.ones(2, dtype=torch.int64, device="meta")}, "lengths is on meta"),
        ({"step": 1.0}, "step is 1.0; allowed: an integer"),
        ({"backend": "fast"}, "backend is 'fast'"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {
        "sample": torch.zeros(2, 4, 2),
        "velocity": torch.zeros(2, 4, 2),
        "sigma": torch.tensor([0.5, 0.5]),
        "sigma_next": torch.tensor([0.25, 0.25]),
        "eta": 0.7,
        "rule": "flow",
        "seed": 0,
        "row_keys": [0, 1],
        "step": 0,
    }
    with pytest.raises(ValueError, match=message):
        flow_step(**(arguments | change))


@pytest.mark.parametrize("name", ["sample", "next_sample", "sigma", "sigma_next", "sigma_max", "eta"])
def test_a_gradient_that_would_be_lost_is_refused(name: str) -> None:
    x, half, quarter = torch.zeros(1, 2, 2), torch.tensor([0.5]), torch.tensor([0.25])
    arguments = {"sample": x, "velocity": x, "next_sample": x, "sigma": half, "sigma_next": quarter}
    arguments |= {"sigma_max": quarter, "eta": torch.tensor([0.7])}
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{name} requires a gradient"):
        flow_log_prob(**arguments, rule="flow")
    with torch.no_grad():
        flow_log_prob(**arguments, rule="flow")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_has_no_gradient(backend: str) -> None:
    x = torch.randn(1, 2, 2, requires_grad=True)
    outputs = flow_step(
        x,
        x,
        torch.tensor([0.5]),
        torch.tensor([0.25]),
        eta=0.7,
        rule="flow",
        seed=0,
        row_keys=[0],
        step=0,
        backend=backend,
    )
    assert not any(output.requires_grad for output in outputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_and_expanded_inputs_give_the_same_bits(backend: str) -> None:
    _, _, sigma, sigma_next = random_step(3, 1, 1)
    one = torch.randn(1, 1, 7).expand(3, 5, 7)
    arguments = {"eta": 0.7, "rule": "flow", "backend": backend}
    noise_key = {"seed": 1, "row_keys": torch.tensor([4]).expand(3), "step": 2}
    results = []
    for x in (one, one.clone(memory_format=torch.contiguous_format)):
        following, log_prob = flow_step(x, x, sigma, sigma_next, **arguments, **noise_key)
        leaf = x.detach().requires_grad_()
        replayed = flow_log_prob(x, leaf, following, sigma, sigma_next, **arguments)
        results.append((following, log_prob, *torch.autograd.grad(replayed.sum(), leaf)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
