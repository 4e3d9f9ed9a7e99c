# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the fused kernels give what the formulas give, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unirl.config import ModelConfig
from unirl.models.bagel import Bagel, ContextRequest, build_contexts, fused, plan_layout, preset
from unirl.models.bagel.layers import RMSNorm, Rotary
from unirl.models.bagel.transformer import in_token_order
from unirl.train.lora import adapter_parameters
from unirl.train.trainable import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPS = 1e-6
ROWS, LATENTS, WIDTH = 3, 130, 3584


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "fusable", lambda *tensors: False)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_close(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("formulas")
def test_norm_and_product_are_the_formulas() -> None:
    module = RMSNorm(WIDTH, EPS).to("cuda", torch.bfloat16).requires_grad_(False)
    torch.nn.init.normal_(module.weight)
    hidden, up, upstream = (random(ROWS, LATENTS, WIDTH).requires_grad_() for _ in range(3))
    for ours, theirs, inputs in (
        (fused.rms_norm(hidden, module.weight, EPS), module(hidden), (hidden,)),
        (fused.silu_product(hidden, up), torch.nn.functional.silu(hidden) * up, (hidden, up)),
    ):
        assert_close((ours,), (theirs,))
        grads = [torch.autograd.grad(result, inputs, upstream) for result in (ours, theirs)]
        assert_close(*grads)


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("num_heads", [28, 4])
def test_heads_are_the_formula_and_rows_do_not_depend_on_their_neighbours(num_heads: int) -> None:
    size = 128
    norms = [RMSNorm(size, EPS).to("cuda", torch.bfloat16).requires_grad_(False) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    und, gen = (random(ROWS, tokens, num_heads * size).requires_grad_() for tokens in (2, LATENTS))
    rotary = Rotary.at(torch.tensor([[7], [64], [2400]], device="cuda"), size, 1e6)
    weights = norms[0].weight, norms[1].weight
    ours = fused.rotated_heads(und, gen, weights, rotary.cos, rotary.sin, EPS)
    heads = [norm(t.unflatten(-1, (-1, size)).float()) for norm, t in zip(norms, (und, gen), strict=True)]
    theirs = rotary.apply(in_token_order(*heads)).bfloat16()
    assert_close((ours,), (theirs,))
    upstream = random(ROWS, num_heads, LATENTS + 2, size).transpose(1, 2)
    assert_close(*(torch.autograd.grad(result, (und, gen), upstream) for result in (ours, theirs)))
    alone = fused.rotated_heads(und[1:2], gen[1:2], weights, rotary.cos[1:2], rotary.sin[1:2], EPS)
    assert torch.equal(alone, ours[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_gives_the_same_velocity_and_gradients(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = preset("bagel-digits").replace(batch_invariant=False)
    model = Bagel(config)
    model.initialize(0)
    torch.nn.init.normal_(model.llm2vae.weight)
    model.to("cuda", dtype)
    prepare(model, ModelConfig(gradient_checkpointing=True), seed=0)
    adapter = list(adapter_parameters(model).values())
    for factor in adapter:
        torch.nn.init.normal_(factor, std=0.1)
    layout = plan_layout(config, list(b"seven"), (12, 8))
    latents, time = random(5, layout.num_latents, 4, dtype=dtype), torch.linspace(0.1, 0.9, 5, device="cuda")
    found = []
    for fuses in (False, True):
        if not fuses:
            monkeypatch.setattr(fused, "fusable", lambda *tensors: False)
        else:
            monkeypatch.undo()
        contexts = build_contexts(model, [ContextRequest(layout)], ["gen"])
        velocity = model.velocity(
            latents,
            time,
            contexts,
            siblings=5,
            latent_position_ids=layout.latent_position_ids().cuda(),
        )
        found.append([velocity.detach(), *torch.autograd.grad(velocity.square().mean(), adapter)])
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance
