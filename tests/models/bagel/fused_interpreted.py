# SPDX-License-Identifier: Apache-2.0
"""The decoder's fused kernels in Triton's interpreter against their formulas; run by test_fused.py in its own process."""

from __future__ import annotations

import dataclasses
import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
import triton
from torch import Tensor

from unirl.models.bagel import Bagel, ContextRequest, fused, plan_layout, preset
from unirl.models.bagel.context import build_contexts
from unirl.models.bagel.layers import RMSNorm, Rotary
from unirl.models.bagel.transformer import in_token_order

EPS = 1e-6
TOLERANCES = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (2e-2, 2e-2)}


def assert_close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


def gradients(function, tensors: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves, upstream)


def norms_equal_the_module(dtype: torch.dtype) -> None:
    for shape in ((3, 5, 96), (1, 3584), (2, 2, 64)):
        module = RMSNorm(shape[-1], EPS).to(dtype)
        torch.nn.init.normal_(module.weight)
        hidden, upstream = torch.randn(2, *shape).to(dtype)
        frozen = module.weight.detach()
        assert_close(fused.rms_norm(hidden, frozen, EPS), module(hidden), dtype)
        (ours,) = gradients(lambda h, w=frozen: fused.rms_norm(h, w, EPS), [hidden], upstream)
        (theirs,) = gradients(module.double(), [hidden.double()], upstream.double())
        assert_close(ours, theirs, dtype)
        trained = gradients(lambda h, w: fused.rms_norm(h, w, EPS), [hidden, frozen], upstream)
        assert_close(trained[0], theirs, dtype)
        unit = hidden.double() * torch.rsqrt(hidden.double().square().mean(-1, keepdim=True) + EPS)
        by_weight = (upstream.double() * unit).flatten(0, -2).sum(0)
        assert float((trained[1].double() - by_weight).norm() / by_weight.norm()) < TOLERANCES[dtype][0]


def heads_equal_the_modules(dtype: torch.dtype) -> None:
    size = 16
    batch = 2
    for num_heads, latents in ((1, 0), (3, 5)):
        norms = [RMSNorm(size, EPS).to(dtype) for _ in range(2)]
        for norm in norms:
            torch.nn.init.normal_(norm.weight)
        weights = tuple(norm.weight.detach() for norm in norms)
        und = torch.randn(batch, 2 if latents else 7, num_heads * size).to(dtype)
        gen = torch.randn(batch, latents, num_heads * size).to(dtype) if latents else None
        positions = torch.arange(batch)[:, None] + 3 if latents else torch.arange(7)[None] + 2
        rotary = Rotary.at(positions, size, 1e4)
        tensors = [und] if gen is None else [und, gen]

        def plain(*tensors: Tensor, norms=norms, rotary=rotary) -> Tensor:
            heads = [
                norm(t.unflatten(-1, (-1, size)).to(t.dtype if t.dtype is torch.float64 else torch.float32))
                for norm, t in zip(norms, tensors, strict=False)
            ]
            return rotary.apply(in_token_order(*heads)).to(tensors[0].dtype)

        def ours(und: Tensor, gen: Tensor | None = None, weights=weights, rotary=rotary) -> Tensor:
            return fused.rotated_heads(und, gen, weights, rotary.cos, rotary.sin, EPS)

        expected = plain(*tensors)
        assert_close(ours(*tensors), expected, dtype)
        # As the attention's backward gives it: heads before tokens in memory, seen in token order.
        upstream = torch.randn(batch, num_heads, expected.shape[1], size).to(dtype).transpose(1, 2)
        for norm in norms:
            norm.double()
        theirs = gradients(plain, [tensor.double() for tensor in tensors], upstream.double())
        for got, wanted in zip(gradients(ours, tensors, upstream), theirs, strict=True):
            assert_close(got, wanted, dtype)


def products_equal_the_formula(dtype: torch.dtype) -> None:
    gate, up, upstream = torch.randn(3, 3, 41, 37).to(dtype)

    def formula(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    assert_close(fused.silu_product(gate, up), formula(gate, up), dtype)
    theirs = gradients(formula, [gate.double(), up.double()], upstream.double())
    for got, wanted in zip(gradients(fused.silu_product, [gate, up], upstream), theirs, strict=True):
        assert_close(got, wanted, dtype)


def rows_do_not_depend_on_their_neighbours() -> None:
    hidden, weight = torch.randn(5, 9, 96), torch.randn(96)
    norm, product = fused.rms_norm(hidden, weight, EPS), fused.silu_product(hidden, hidden)
    assert torch.equal(fused.rms_norm(hidden[3:4], weight, EPS), norm[3:4])
    assert torch.equal(fused.silu_product(hidden[3:4], hidden[3:4]), product[3:4])
    rotary = Rotary.at(torch.tensor([[4]]), 32, 1e4)

    def heads(rows: slice) -> Tensor:
        und = hidden[rows, :2].contiguous()
        return fused.rotated_heads(
            und, hidden[rows], (weight[:32], weight[32:64]), rotary.cos, rotary.sin, EPS
        )

    assert torch.equal(heads(slice(3, 4)), heads(slice(0, 5))[3:4])


def the_model_gives_the_same_velocity_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config = preset("bagel-digits")
    model = Bagel(config.replace(language=dataclasses.replace(config.language, num_hidden_layers=2)))
    model.initialize(0)
    torch.nn.init.normal_(model.llm2vae.weight)
    model.gradient_checkpointing = True
    layout = plan_layout(config, list(b"7"), (4, 4))
    latents, time = torch.randn(2, 4, 4), torch.tensor([0.2, 0.7])
    norms = ("layernorm", "q_norm", "k_norm")
    for trained in (("moe_gen",), ("moe_gen", *norms)):  # with the norms' weights frozen, and not
        weights = []
        for name, parameter in model.named_parameters():
            is_norm = any(norm in name for norm in norms)
            parameter.requires_grad_(
                "moe_gen" in name and ".layers." in name and (not is_norm or len(trained) > 1)
            )
            weights += [parameter] if parameter.requires_grad else []
        found = []
        for fuses in (False, True):
            monkeypatch.setattr(fused, "fusable", lambda *tensors, fuses=fuses: fuses)
            contexts = build_contexts(model, [ContextRequest(layout)], ["gen"])
            velocity = model.velocity(
                latents, time, contexts, siblings=2, latent_position_ids=layout.latent_position_ids()
            )
            found.append([velocity.detach(), *torch.autograd.grad(velocity.square().sum(), weights)])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in TOLERANCES:
        norms_equal_the_module(dtype)
        heads_equal_the_modules(dtype)
        products_equal_the_formula(dtype)
    rows_do_not_depend_on_their_neighbours()
    with pytest.MonkeyPatch.context() as patch:
        the_model_gives_the_same_velocity_and_gradients(patch)
    print("equal", triton.__version__)
