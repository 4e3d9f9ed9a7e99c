# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from unirl.sde import StepSet, dynamic_sigmas, linear_mu, shifted_sigmas


def test_static_shift_by_its_formula() -> None:
    got = shifted_sigmas(10, 3.0)
    want = [3 * t / (1 + 2 * t) for t in (1 - i / 10 for i in range(11))]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize(("tokens", "mu"), [(1024, 0.63), (2304, 0.8467), (4096, 1.15)])
def test_mu_of_flux_by_token_count(tokens: int, mu: float) -> None:
    got = linear_mu(tokens, base_tokens=256, max_tokens=4096, base_shift=0.5, max_shift=1.15)
    assert got == pytest.approx(mu, abs=5e-5)


@pytest.mark.parametrize(("tokens", "mu"), [(1024, 0.5387), (2304, 0.6032), (4096, 0.6935)])
def test_mu_of_qwen_image_by_token_count(tokens: int, mu: float) -> None:
    got = linear_mu(tokens, base_tokens=256, max_tokens=8192, base_shift=0.5, max_shift=0.9)
    assert got == pytest.approx(mu, abs=5e-5)


@pytest.mark.parametrize("terminal", [None, 0.02])
@pytest.mark.parametrize("mu", [0.5387, 1.15])
def test_dynamic_shift_equals_diffusers(mu: float, terminal: float | None) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
    steps = 14
    scheduler.set_timesteps(sigmas=[1 - i * (1 - 1 / steps) / (steps - 1) for i in range(steps)], mu=mu)
    torch.testing.assert_close(
        dynamic_sigmas(steps, mu, terminal=terminal).float(), scheduler.sigmas, atol=2e-7, rtol=0
    )


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_bad_shift_names_the_key(bad: float) -> None:
    with pytest.raises(ValueError, match=r"sampling\.shift"):
        shifted_sigmas(4, bad)


def test_siblings_share_the_step_set_however_they_are_split() -> None:
    steps = StepSet(kind="random", fraction=(0.0, 0.5), num_sde_steps=2)
    common = {"seed": 7, "iteration": 3, "num_inference_steps": 14, "rule": "flow"}
    ids = [f"r3.p{p}/{j}" for p in range(6) for j in range(4)]
    whole = steps.for_rows(ids, **common)
    assert all(torch.equal(whole[4 * p], whole[4 * p + j]) for p in range(6) for j in range(4))
    assert torch.equal(
        torch.cat([steps.for_rows(ids[:5], **common), steps.for_rows(ids[5:], **common)]), whole
    )
    assert len({tuple(r) for r in whole.tolist()}) > 1
    assert not torch.equal(whole, steps.for_rows(ids, **(common | {"iteration": 4})))
    assert not torch.equal(whole, steps.for_rows(ids, **(common | {"seed": 8})))
    assert whole.max() < 7 and bool((whole[:, 0] < whole[:, 1]).all())


def test_windows_are_consecutive_and_cover_the_range() -> None:
    steps = StepSet(kind="window", num_sde_steps=3)
    seen = set()
    for iteration in range(200):
        window = steps.resolve(seed=0, group_id="g", iteration=iteration, num_inference_steps=8, rule="flow")
        assert window == list(range(window[0], window[0] + 3))
        seen.add(window[0])
    assert seen == set(range(6))


def test_the_last_cps_step_is_never_trained() -> None:
    everything = StepSet().resolve(seed=0, group_id="g", iteration=0, num_inference_steps=5, rule="cps")
    assert everything == [0, 1, 2, 3]


def test_progressive_windows_move_on() -> None:
    steps = StepSet(kind="progressive", num_sde_steps=2, iterations_per_shift=2)
    starts = [
        steps.resolve(seed=0, group_id="g", iteration=i, num_inference_steps=4, rule="flow")[0]
        for i in range(8)
    ]
    assert starts == [0, 0, 1, 1, 2, 2, 0, 0]


@pytest.mark.parametrize("count", [0, 8, None])
def test_an_impossible_number_of_steps_names_key_and_bounds(count: int | None) -> None:
    with pytest.raises(ValueError, match=rf"num_sde_steps is {count}; allowed: 1 to 7"):
        StepSet(kind="random", fraction=(0, 0.5), num_sde_steps=count).check(14, "flow")
