# SPDX-License-Identifier: Apache-2.0
"""The public reference implementation's numbers, met by our model with the same weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.bagel.conftest import MODES, Golden, relative_error
from unirl.models.bagel import Guidance, build_contexts
from unirl.models.bagel.layout import CONTEXT_NAMES
from unirl.sde import shifted_sigmas

RENORMS = ("global", "channel", "text_channel")


@pytest.mark.parametrize("mode", MODES)
def test_context_lengths_and_positions_are_exact(golden: Golden, mode: str) -> None:
    layout = golden.request(mode).layout
    for name in CONTEXT_NAMES:
        expected = golden.facts["contexts"][f"{mode}.{name}"]
        context = layout.context(name)
        assert {"kv_len": context.kv_len, "rope_offset": context.rope_offset} == expected
    assert torch.equal(layout.position_ids(), golden.vectors[f"{mode}.position_ids"])
    assert torch.equal(layout.latent_position_ids(), golden.vectors[f"{mode}.latent_position_ids"])


@pytest.mark.parametrize("mode", MODES)
def test_keys_and_values_of_every_context_and_layer(golden: Golden, mode: str) -> None:
    contexts = build_contexts(golden.model, [golden.request(mode)])
    compared = 0
    for name in CONTEXT_NAMES:
        context = contexts.of(name)
        assert context.lengths == (golden.facts["contexts"][f"{mode}.{name}"]["kv_len"],)
        for index, layer in enumerate(context.layers):
            for part, tensor in (("key", layer.key), ("value", layer.value)):
                expected = golden.vectors.get(f"{mode}.{name}.{part}.{index}")
                if expected is None:  # the empty context
                    assert tensor.shape[2] == 0
                    continue
                assert relative_error(tensor[0].transpose(0, 1), expected) < 1e-5
                compared += 1
    assert compared == (8 if mode == "t2i" else 12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("time", ["1.0", "0.7"])
def test_velocity_without_guidance(golden: Golden, mode: str, time: str) -> None:
    velocity = _guided(golden, mode, Guidance(), float(time))
    assert relative_error(velocity, golden.vectors[f"{mode}.velocity.t{time}"]) < 1e-5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("renorm", RENORMS)
@pytest.mark.parametrize("suffix", ["text4", "text4.img1.5", "text4.img1.5.min0.97"])
def test_guided_velocity_of_every_renorm_kind(golden: Golden, mode: str, renorm: str, suffix: str) -> None:
    scales, _, minimum = suffix.partition(".min")
    guidance = Guidance(
        text_scale=4.0,
        image_scale=1.5 if "img1.5" in scales else 1.0,
        renorm=renorm,
        renorm_min=float(minimum) if minimum else 0.0,
    )
    name = f"{mode}.velocity.t0.7.{scales}.{renorm}" + (f".min{minimum}" if minimum else "")
    assert relative_error(_guided(golden, mode, guidance, 0.7), golden.vectors[name]) < 1e-5


def test_every_golden_velocity_is_compared(golden: Golden) -> None:
    names = {name for name in golden.vectors if ".velocity." in name}
    assert len(names) == len(MODES) * (2 + len(RENORMS) * 3)


@pytest.mark.parametrize("mode", MODES)
def test_five_euler_steps(golden: Golden, mode: str) -> None:
    request = golden.request(mode)
    contexts = build_contexts(golden.model, [request], ["gen"])
    latents = golden.vectors["in.x_t"][None]
    sigmas = shifted_sigmas(5, 3.0).float()
    for sigma, following in itertools.pairwise(sigmas):
        velocity = golden.model.velocity(
            latents,
            sigma[None],
            contexts,
            siblings=1,
            latent_position_ids=request.layout.latent_position_ids(),
        )
        latents = latents + (following - sigma) * velocity
    assert relative_error(latents[0], golden.vectors[f"{mode}.euler6.shift3"]) < 1e-4


def test_guidance_outside_its_interval_leaves_the_conditional_velocity(golden: Golden) -> None:
    guidance = Guidance(text_scale=4.0, image_scale=1.5, interval=(0.7, 1.0))
    plain = golden.vectors["it2i.velocity.t0.7"]
    assert torch.equal(_guided(golden, "it2i", guidance, 0.7), _guided(golden, "it2i", Guidance(), 0.7))
    assert relative_error(_guided(golden, "it2i", guidance, 0.7), plain) < 1e-5
    inside = Guidance(text_scale=4.0, image_scale=1.5, interval=(0.4, 0.7))
    expected = golden.vectors["it2i.velocity.t0.7.text4.img1.5.global"]
    assert relative_error(_guided(golden, "it2i", inside, 0.7), expected) < 1e-5


def test_rows_in_and_out_of_the_guidance_interval_share_a_batch(golden: Golden) -> None:
    request = golden.request("it2i")
    guidance = Guidance(text_scale=4.0, image_scale=1.5, interval=(0.8, 1.0))
    contexts = build_contexts(golden.model, [request])
    both = guidance.velocity(
        golden.model,
        golden.vectors["in.x_t"].expand(2, -1, -1),
        torch.tensor([1.0, 0.7], dtype=torch.float64),
        contexts,
        siblings=2,
        latent_position_ids=request.layout.latent_position_ids(),
    )
    assert relative_error(both[0], _guided(golden, "it2i", guidance, 1.0)) < 1e-5
    assert relative_error(both[1], golden.vectors["it2i.velocity.t0.7"]) < 1e-5


def test_time_enters_as_float32(golden: Golden) -> None:
    frequencies = golden.model.time_embedder.frequencies(torch.tensor([0.8333], dtype=torch.float64))
    assert frequencies.dtype is torch.float32
    expected = torch.cos(torch.tensor(0.8333, dtype=torch.float64))
    assert abs(float(frequencies[0, 0]) - float(expected)) < 1e-7
    half = golden.model.time_embedder.frequencies(torch.tensor([0.8333]).bfloat16())
    assert abs(float(half[0, 0]) - float(expected)) > 1e-4  # what a time rounded on its way would give


def _guided(golden: Golden, mode: str, guidance: Guidance, time: float) -> torch.Tensor:
    request = golden.request(mode)
    contexts = build_contexts(golden.model, [request], guidance.contexts)
    velocity = guidance.velocity(
        golden.model,
        golden.vectors["in.x_t"][None],
        torch.tensor([time], dtype=torch.float64),
        contexts,
        siblings=1,
        latent_position_ids=request.layout.latent_position_ids(),
    )
    return velocity[0]
