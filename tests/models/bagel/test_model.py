# SPDX-License-Identifier: Apache-2.0
"""The forward pass: experts, batches, gradients."""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from tests.models.bagel.conftest import Golden, relative_error
from unirl.models.bagel import (
    Bagel,
    ContextRequest,
    Contexts,
    SourceImage,
    build_contexts,
    plan_layout,
    preset,
)
from unirl.models.bagel.layers import Linear, make_batch_invariant
from unirl.models.bagel.transformer import by_expert, in_token_order

PROMPTS = ("a handwritten three", "seven", "the digit nine, written by hand")


def _request(
    model: Bagel, prompt: str, canvas: tuple[int, int] = (8, 8), source: int | None = None
) -> ContextRequest:
    image, sizes = None, None
    if source is not None:
        pixels = torch.rand(1, 8, 12, generator=torch.Generator().manual_seed(source)) * 2 - 1
        image, sizes = SourceImage(pixels, pixels, source), ((8, 12), (8, 12))
    return ContextRequest(plan_layout(model.config, list(prompt.encode()), canvas, sizes), image)


def _latents(rows: int, tokens: int = 16) -> Tensor:
    return torch.randn(rows, tokens, 4, generator=torch.Generator().manual_seed(3))


def _velocity(
    model: Bagel, latents: Tensor, time: Tensor, contexts: Contexts, request: ContextRequest, **kwargs: object
) -> Tensor:
    return model.velocity(
        latents,
        time,
        contexts,
        siblings=latents.shape[0] // contexts.of("gen").num_groups,
        latent_position_ids=request.layout.latent_position_ids(),
        **kwargs,
    )


def test_text_and_vision_reach_the_understanding_expert_and_latents_the_generation_expert(
    digits: Bagel,
) -> None:
    called: dict[str, list[int]] = {"und": [], "gen": []}
    attention = digits.language_model.model.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda _, inputs, __: called["und"].append(inputs[0].shape[1]))
    attention.k_proj_moe_gen.register_forward_hook(
        lambda _, inputs, __: called["gen"].append(inputs[0].shape[1])
    )
    request = _request(digits, "seven", source=0)
    contexts = build_contexts(digits, [request])
    # Markers of the VAE block, the ViT block with its markers, the text; then the text alone for image guidance.
    assert called == {"und": [2, 4 * 6 + 2, 7, 7], "gen": [4 * 6]}
    called["und"].clear(), called["gen"].clear()
    _velocity(digits, _latents(2), torch.tensor([0.3, 0.9]), contexts, request)
    assert called == {"und": [2], "gen": [16]}


def test_the_generation_expert_moves_latents_only(digits: Bagel) -> None:
    requests = [_request(digits, "seven", source=0)]
    before = build_contexts(digits, requests)
    with torch.no_grad():
        for name, parameter in digits.named_parameters():
            if "moe_gen" in name:
                parameter.mul_(1.5)
    after = build_contexts(digits, requests)
    text_only = zip(before.of("cfg_img").layers, after.of("cfg_img").layers, strict=True)
    assert all(torch.equal(a.key, b.key) and torch.equal(a.value, b.value) for a, b in text_only)
    a, b = before.of("gen").layers[0].key, after.of("gen").layers[0].key
    changed = (a != b).any(dim=-1).any(dim=1)[0]
    # In the first layer only the 24 source latents differ, not the markers around them nor what follows.
    assert changed.nonzero().flatten().tolist() == list(range(1, 25))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("canvas", [(8, 8), (12, 12), (6, 10)])
def test_a_row_alone_and_in_a_batch(digits: Bagel, canvas: tuple[int, int], batch_invariant: bool) -> None:
    make_batch_invariant(digits, batch_invariant)
    tokens = canvas[0] * canvas[1] // 4
    requests = [
        _request(digits, prompt, canvas, source)
        for prompt, source in zip(PROMPTS, (None, 1, None), strict=True)
    ]
    latents, time = _latents(9, tokens), torch.linspace(1.0, 0.05, 9)
    names = ["gen", "cfg_text", "cfg_img"]
    with torch.no_grad():
        for name in names:
            together = _velocity(
                digits, latents, time, build_contexts(digits, requests, names), requests[0], which=name
            )
            for row in range(9):
                own = [requests[row // 3]]
                alone = _velocity(
                    digits,
                    latents[row : row + 1],
                    time[row : row + 1],
                    build_contexts(digits, own, names),
                    own[0],
                    which=name,
                )
                if batch_invariant:
                    assert torch.equal(alone[0], together[row])
                else:
                    assert relative_error(alone[0], together[row]) < 5e-6


def test_a_plain_linear_layer_differs_between_batch_sizes_and_ours_does_not() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer, rows = Linear(64, 64).requires_grad_(False), torch.randn(120, 64)
    layer.batch_invariant = True
    whole = layer(rows)
    for size in (1, 2, 3, 5, 7, 8, 60):
        pieces = torch.cat([layer(rows[start : start + size]) for start in range(0, 120, size)])
        assert torch.equal(pieces, whole)
    assert relative_error(whole, nn.functional.linear(rows, layer.weight, layer.bias)) < 1e-6


def test_same_prompts_are_prefilled_once(digits: Bagel) -> None:
    rows: list[int] = []
    digits.language_model.model.layers[0].self_attn.k_proj.register_forward_hook(
        lambda _, inputs, __: rows.append(inputs[0].shape[0])
    )
    requests = [_request(digits, prompt) for prompt in ("one", "two", "one", "three", "two", "one")]
    contexts = build_contexts(digits, requests)
    assert sum(rows) == 3  # text-to-image: image guidance reads the generation context itself
    assert contexts.of("cfg_img").layers[0].key is contexts.of("gen").layers[0].key
    key = contexts.of("gen").layers[1].key
    assert torch.equal(key[0], key[2]) and torch.equal(key[1], key[4])
    assert contexts.of("gen").lengths == (5, 5, 5, 7, 5, 5)


def test_padding_texts_into_one_prefill_changes_nothing_but_last_bits(digits: Bagel) -> None:
    requests = [_request(digits, prompt) for prompt in PROMPTS]
    padded, exact = (
        build_contexts(digits, requests, ["gen"], pad_text=pad).of("gen") for pad in (True, False)
    )
    assert padded.lengths == exact.lengths
    for a, b in zip(padded.layers, exact.layers, strict=True):
        for group, length in enumerate(exact.lengths):
            assert torch.allclose(a.key[group, :, :length], b.key[group, :, :length], atol=1e-5)
            assert torch.allclose(a.value[group, :, :length], b.value[group, :, :length], atol=1e-5)


def test_gradient_checkpointing_changes_no_gradient(digits: Bagel) -> None:
    request = _request(digits, "seven", source=0)

    def gradients() -> list[Tensor]:
        digits.zero_grad()
        contexts = build_contexts(digits, [request])
        velocity = _velocity(digits, _latents(2), torch.tensor([0.3, 0.9]), contexts, request)
        velocity.square().sum().backward()
        return [p.grad.clone() for p in digits.parameters() if p.grad is not None]

    plain = gradients()
    digits.gradient_checkpointing = True
    assert digits.gradient_checkpointing
    again = gradients()
    assert len(plain) == len(again) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_training_mode_and_evaluation_mode_agree(digits: Bagel) -> None:
    request = _request(digits, "seven", source=0)
    results = []
    for training in (True, False):
        digits.train(training)
        contexts = build_contexts(digits, [request])
        results.append(_velocity(digits, _latents(2), torch.tensor([0.3, 0.9]), contexts, request))
    assert torch.equal(*results)


def test_lora_on_the_generation_expert_gets_gradients_through_the_source_image(digits: Bagel) -> None:
    _inject(digits)
    request = _request(digits, "seven", source=0)
    contexts = build_contexts(digits, [request], ["gen"])
    # The text-only prefix goes through frozen weights: no graph is kept for it.
    assert contexts.of("gen").layers[0].key.requires_grad
    assert (
        not build_contexts(digits, [_request(digits, "seven")], ["gen"]).of("gen").layers[0].key.requires_grad
    )
    weight = digits.language_model.model.layers[1].mlp_moe_gen.down_proj.lora_B["default"].weight

    def loss(rebuild: bool) -> Tensor:
        built = build_contexts(digits, [request], ["gen"]) if rebuild else contexts
        return (
            _velocity(digits, _latents(2), torch.tensor([0.3, 0.9]), built, request).double().square().sum()
        )

    (gradient,) = torch.autograd.grad(loss(True), weight)
    direction = gradient / gradient.norm()
    step = 1e-2
    with torch.no_grad():
        weight.add_(direction, alpha=step)
        up = loss(True)
        weight.add_(direction, alpha=-2 * step)
        slope = (up - loss(True)) / (2 * step)
    assert abs(float(slope / gradient.norm()) - 1) < 2e-2


def test_adapter_off_is_the_base_and_merged_is_unmerged(digits: Bagel) -> None:
    request = _request(digits, "seven", source=0)

    def velocity() -> Tensor:
        with torch.no_grad():
            contexts = build_contexts(digits, [request])
            return _velocity(digits, _latents(2), torch.tensor([0.3, 0.9]), contexts, request)

    base = velocity()
    _inject(digits)
    adapted = velocity()
    assert relative_error(adapted, base) > 1e-2
    layers = [module for module in digits.modules() if hasattr(module, "lora_A") and hasattr(module, "merge")]
    assert len(layers) == 4 * 7
    for layer in layers:
        layer.enable_adapters(False)
    assert torch.equal(velocity(), base)
    for layer in layers:
        layer.enable_adapters(True)
    assert torch.equal(velocity(), adapted)
    for layer in layers:
        layer.merge()
    assert relative_error(velocity(), adapted) < 1e-5


def test_an_adapter_keeps_rows_independent_once_it_is_made_batch_invariant(golden: Golden) -> None:
    model = Bagel(golden.model.config.replace(batch_invariant=True))
    model.load_state_dict(golden.model.state_dict())
    _inject(model)
    make_batch_invariant(model)
    request = golden.request("t2i")
    x = torch.randn(5, 24, 64, generator=torch.Generator().manual_seed(0))
    time = torch.linspace(0.9, 0.1, 5)
    with torch.no_grad():
        contexts = build_contexts(model, [request])
        together = _velocity(model, x, time, contexts, request)
        alone = torch.cat(
            [_velocity(model, x[i : i + 1], time[i : i + 1], contexts, request) for i in range(5)]
        )
    assert torch.equal(alone, together)


def test_bfloat16_weights_give_the_float32_velocity_within_their_precision(golden: Golden) -> None:
    model = Bagel(golden.model.config).bfloat16()
    model.load_state_dict(golden.model.state_dict())
    request = golden.request("it2i")
    with torch.no_grad():
        contexts = build_contexts(model, [request])
        velocity = _velocity(model, golden.vectors["in.x_t"][None], torch.tensor([0.7]), contexts, request)
    assert velocity.dtype is torch.float32
    assert relative_error(velocity[0], golden.vectors["it2i.velocity.t0.7"]) < 3e-2


def test_scaled_time_keeps_its_fraction(digits: Bagel) -> None:
    frequencies = digits.time_embedder.frequencies(torch.tensor([0.833333], dtype=torch.float64))
    expected = torch.cos(torch.tensor(833.333, dtype=torch.float64))
    assert abs(float(frequencies[0, 0]) - float(expected)) < 2e-4
    # What bfloat16 (832) and float16 (833.5) would make of it.
    assert abs(float(torch.cos(torch.tensor(832.0))) - float(expected)) > 0.1
    assert abs(float(torch.cos(torch.tensor(833.5))) - float(expected)) > 0.1


def test_wrong_numbers_of_groups_and_missing_sources_are_errors(digits: Bagel) -> None:
    request = _request(digits, "seven")
    contexts = build_contexts(digits, [request], ["gen"])
    with pytest.raises(
        ValueError, match=re.escape("velocity of 4 rows with siblings=2 needs contexts of 2 groups")
    ):
        digits.velocity(
            _latents(4),
            torch.ones(4),
            contexts,
            siblings=2,
            latent_position_ids=request.layout.latent_position_ids(),
        )
    with pytest.raises(ValueError, match="context 'cfg_text' was not built; built: gen"):
        contexts.of("cfg_text")
    with pytest.raises(ValueError, match="request 0 has a source image in its layout but brings none"):
        build_contexts(digits, [ContextRequest(_request(digits, "seven", source=0).layout)])


def _inject(model: nn.Module) -> None:
    """LoRA with random non-zero matrices on every projection of the generation expert."""
    pattern = r".*(self_attn\.[qkvo]_proj_moe_gen|mlp_moe_gen\.(gate|up|down)_proj)"
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=pattern), model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_tokens_by_expert_and_back_in_order_with_gradients() -> None:
    block = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    block.requires_grad_()
    ends, between = by_expert(block)
    assert torch.equal(ends, block[:, [0, -1]]) and torch.equal(between, block[:, 1:-1])
    assert torch.equal(in_token_order(ends, between), block)
    assert torch.autograd.gradcheck(by_expert, block)
    (gradient,) = torch.autograd.grad(by_expert(block)[1].sum(), block)  # the markers are not always read
    assert torch.equal(gradient[:, :, 0], torch.tensor([[0, 1, 1, 1, 1, 1, 0]] * 2).double())


def test_marker_ids_first_read_in_inference_mode_can_be_trained_on() -> None:
    model = Bagel(preset("bagel-digits"))
    with torch.inference_mode():
        before = model.marker_ids
    embedding = model.language_model.model.embed_tokens.requires_grad_()
    embedding(model.marker_ids).sum().backward()
    counts = torch.zeros(embedding.num_embeddings)
    counts[before.tolist()] = 1
    assert torch.equal(embedding.weight.grad, counts[:, None].expand_as(embedding.weight))
