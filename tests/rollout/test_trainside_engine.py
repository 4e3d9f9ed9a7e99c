# SPDX-License-Identifier: Apache-2.0
"""The in-process engine with a real model: what it generates, and what a push does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unirl.config import LoraConfig, ModelConfig
from unirl.models.bagel import BagelStage
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.train import lora
from unirl.train.trainable import prepare
from unirl.train.weights import apply_push, build_push
from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

MODEL = ModelConfig(lora=LoraConfig(rank=4, alpha=8))


def stage(base: Path) -> BagelStage:
    built = BagelStage.from_pretrained(base)
    prepare(built.model, MODEL, seed=0)
    return built


def engine(base: Path) -> TrainsideEngine:
    own = stage(base)
    return TrainsideEngine(own, own.model, apply_push)


def request(rollout: int = 0, siblings: int = 4, **changes: object) -> Sample:
    values: dict[str, object] = {
        "height": 8,
        "width": 8,
        "num_inference_steps": 3,
        "eta": 0.7,
        "rule": "flow",
        "noise": NoiseRecipe(0),
    }
    params = SamplingParams(**(values | changes))  # type: ignore[arg-type]
    prompts = Part(ids=(f"r{rollout}.p0",), prompts=("a three",), metadata=({},), params=params)
    sample = Sample((prompts,)).fork(siblings, params)
    steps = torch.tensor([[0, 1]] * siblings)
    return sample.replace_frontier(sample.frontier.replace(sde_steps=steps))


def latents(generated: Sample) -> torch.Tensor:
    return torch.stack(generated.frontier.segment.rows())


def random_adapter(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lora.adapter_parameters(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


def test_a_push_of_a_random_adapter_changes_the_output_and_agrees_in_digest(random_base: Path) -> None:
    receiver, trainer = engine(random_base), stage(random_base)
    before = latents(receiver.generate(request()))
    random_adapter(trainer.model, seed=1)
    push = build_push(trainer.model, 1, 5)
    assert receiver.load(push) == push.digest
    generated = receiver.generate(request())
    assert not torch.equal(latents(generated)[:, -1], before[:, -1])
    assert generated.frontier.push_version.tolist() == [1] * 4
    assert generated.frontier.policy_step.tolist() == [5] * 4


def test_pushing_twice_is_pushing_once(random_base: Path) -> None:
    receiver, trainer = engine(random_base), stage(random_base)
    random_adapter(trainer.model, seed=1)
    push = build_push(trainer.model, 1, 1)
    receiver.load(push)
    once = latents(receiver.generate(request()))
    receiver.load(push)
    assert torch.equal(latents(receiver.generate(request())), once)


def test_a_push_without_an_optimizer_step_changes_no_output_bit(random_base: Path) -> None:
    receiver, trainer = engine(random_base), stage(random_base)
    before = latents(receiver.generate(request()))
    receiver.load(build_push(trainer.model, 1, 0))
    assert torch.equal(latents(receiver.generate(request())), before)


def test_sleep_and_wake_change_no_output_bit(random_base: Path) -> None:
    own = engine(random_base)
    before = latents(own.generate(request()))
    own.sleep()
    own.wake()
    assert torch.equal(latents(own.generate(request())), before)


def test_siblings_start_from_distinct_noise_and_another_rollout_draws_anew(random_base: Path) -> None:
    own = engine(random_base)
    first = latents(own.generate(request(0)))[:, 0].flatten(1)
    assert len({tuple(r) for r in first.tolist()}) == 4
    again = latents(own.generate(request(0)))[:, 0].flatten(1)
    assert torch.equal(first, again)
    other = latents(own.generate(request(1)))[:, 0].flatten(1)
    assert not any(torch.equal(a, b) for a in first for b in other)


def test_init_same_noise_gives_one_initial_latent_and_distinct_step_noises(random_base: Path) -> None:
    noise = NoiseRecipe(0, init_same_noise=True)
    frames = latents(engine(random_base).generate(request(noise=noise)))
    assert len({tuple(r) for r in frames[:, 0].flatten(1).tolist()}) == 1
    assert len({tuple(r) for r in frames[:, 1].flatten(1).tolist()}) == 4


def test_a_canvas_the_engine_cannot_honour_is_refused_by_its_name(random_base: Path) -> None:
    asked = request()
    rows = asked.frontier.replace(metadata=({"canvas": [32, 32]},) * 4)
    with pytest.raises(
        ValueError, match=r"engine trainside cannot honour a canvas: row 'r0.p0/0'.*\[32, 32\]"
    ):
        engine(random_base).check(rows)
