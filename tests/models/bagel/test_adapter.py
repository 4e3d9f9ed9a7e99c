# SPDX-License-Identifier: Apache-2.0
"""Linear layers with an adapter: the products of 16-bit inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from unirl.models.bagel import adapter
from unirl.models.bagel.adapter import adapted, project, project_onto
from unirl.models.bagel.layers import Linear, make_batch_invariant

ROWS, TOKENS, IN, OUT, RANK = 3, 7, 96, 64, 8
SCALE = 2.0


def problem(dtype: torch.dtype, has_bias: bool) -> tuple[Linear, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    base = Linear(IN, OUT, bias=has_bias).to(dtype).requires_grad_(False)
    down, up = torch.randn(RANK, IN) * IN**-0.5, torch.randn(OUT, RANK) * RANK**-0.5
    return base, torch.randn(ROWS, TOKENS, IN).to(dtype), down, up


def error(got: Tensor, wanted: Tensor) -> float:
    return float(((got.double() - wanted).norm() / wanted.norm()).detach())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_value_and_gradients_are_those_of_float64(
    dtype: torch.dtype, tolerance: float, invariant: bool, has_bias: bool
) -> None:
    base, input, down, up = problem(dtype, has_bias)
    base.batch_invariant = invariant
    upstream = torch.randn(ROWS, TOKENS, OUT).to(dtype)
    leaves = [tensor.requires_grad_() for tensor in (input, down, up)]
    result = adapted(input, base, down, up, SCALE)
    grads = torch.autograd.grad(result, leaves, upstream)
    assert result.dtype is dtype and [grad.dtype for grad in grads] == [dtype, torch.float32, torch.float32]
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    plain = nn.functional.linear(exact[0], base.weight.double(), base.bias.double() if has_bias else None)
    wanted = plain + SCALE * (exact[0] @ exact[1].T @ exact[2].T)
    expected = torch.autograd.grad(wanted, exact, upstream.double())
    for got, exactly in zip((result, *grads), (wanted, *expected), strict=True):
        assert error(got, exactly) < tolerance


def test_a_row_keeps_its_bits_in_every_batch() -> None:
    base, input, down, up = problem(torch.bfloat16, has_bias=True)
    base.batch_invariant = True
    together = adapted(input, base, down, up, SCALE)
    assert torch.equal(adapted(input[1:2], base, down, up, SCALE), together[1:2])


def model_with_adapter(device: str, dtype: torch.dtype) -> nn.Sequential:
    model = nn.Sequential(Linear(IN, OUT)).to(device, dtype)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0"]), model)
    for factor in (model[0].lora_A, model[0].lora_B):
        factor["default"].weight.data = torch.randn_like(factor["default"].weight, dtype=torch.float32)
    return model


def test_on_a_cpu_the_adapter_is_pefts() -> None:
    model = model_with_adapter("cpu", torch.bfloat16)
    input = torch.randn(ROWS, TOKENS, IN).bfloat16()
    assert torch.equal(project(model[0], input), model[0](input))


BF16_ON_A_GPU: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, ndim=3)
"""As much of an input as the choice of a path looks at."""


def test_on_a_gpu_what_is_no_lora_goes_its_own_way() -> None:
    model = nn.Sequential(Linear(IN, OUT)).bfloat16()
    inject_adapter_in_model(IA3Config(target_modules=["0"], feedforward_modules=[]), model)
    model[0].forward = lambda input: "its own"
    assert project(model[0], BF16_ON_A_GPU) == "its own"


@pytest.mark.parametrize("is_cast", [False, True])
def test_autocast_gets_the_layers_as_they_are(is_cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", {"cuda": is_cast}.__getitem__)
    monkeypatch.setattr(adapter, "adapted", lambda input, *others: "in place")
    model = model_with_adapter("cpu", torch.bfloat16)
    model[0].forward = lambda input: "peft's"
    model[0].get_base_layer().requires_grad_(False)
    assert project(model[0], BF16_ON_A_GPU) == ("peft's" if is_cast else "in place")
    plain = Linear(IN, OUT, bias=False).bfloat16()
    assert adapter._adds_itself(plain, BF16_ON_A_GPU) is not is_cast


def test_a_frozen_copy_of_trained_weights_goes_the_same_way() -> None:
    layer = Linear(IN, OUT, bias=False).bfloat16()
    ways = [adapter._adds_itself(layer.requires_grad_(trained), BF16_ON_A_GPU) for trained in (False, True)]
    assert ways == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("with_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_a_float32_residual_stays_float32(with_graph: bool, dtype: torch.dtype) -> None:
    layer = Linear(IN, OUT, bias=False).to("cuda").requires_grad_(False)
    input = torch.randn(ROWS, TOKENS, IN, device="cuda").to(dtype)
    residual = torch.randn(ROWS, TOKENS, OUT, device="cuda")
    wanted = residual.double() + input.double() @ layer.weight.double().T
    with torch.set_grad_enabled(with_graph), torch.autocast("cuda", torch.bfloat16):
        result = project_onto(residual, layer, input)
    assert result.dtype is torch.float32 and error(result, wanted) < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("invariant", [False, True])
def test_on_a_gpu_the_adapter_is_pefts_within_the_dtype(invariant: bool) -> None:
    model = model_with_adapter("cuda", torch.bfloat16)
    if invariant:
        make_batch_invariant(model)
    input = torch.randn(ROWS, TOKENS, IN, device="cuda").bfloat16()
    assert error(project(model[0], input), model[0](input).double()) < 1e-2
    model[0].enable_adapters(False)
    assert torch.equal(project(model[0], input), model[0].get_base_layer()(input))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("with_graph", [False, True])
def test_a_product_added_to_the_residual(
    strided: bool, with_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Linear(IN, OUT, bias=False).double()
    input = torch.randn(ROWS, TOKENS + 2, IN, dtype=torch.float64)
    input = input[:, 1:-1] if strided else input[:, :TOKENS].contiguous()
    residual, upstream = torch.randn(2, ROWS, TOKENS, OUT, dtype=torch.float64)
    wanted = residual + input @ layer.weight.T
    monkeypatch.setattr(adapter, "_adds_itself", lambda *arguments: True)
    leaves = [input.detach().requires_grad_(), residual.detach().requires_grad_()]
    with torch.set_grad_enabled(with_graph):
        kept = residual.clone()
        result = project_onto(leaves[1] if with_graph else residual, layer, leaves[0])
    torch.testing.assert_close(result, wanted)
    assert torch.equal(residual, kept) is with_graph
    if with_graph:
        grads = torch.autograd.grad(result, [*leaves, layer.weight], upstream)
        by_weight = upstream.flatten(0, 1).T @ leaves[0].flatten(0, 1)
        torch.testing.assert_close(grads, (upstream @ layer.weight, upstream, by_weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strided", [False, True])
def test_the_bits_of_a_sum_do_not_depend_on_whether_a_graph_is_kept(strided: bool) -> None:
    layer = Linear(IN, OUT, bias=False).to("cuda", torch.bfloat16).requires_grad_(False)
    block = torch.randn(ROWS, TOKENS + 2, IN, device="cuda").bfloat16()
    input = block[:, 1:-1] if strided else block[:, 1:-1].contiguous()
    residual = torch.randn(ROWS, TOKENS, OUT, device="cuda").bfloat16()
    kept = project_onto(residual, layer, input)
    assert error(kept, residual.double() + input.double() @ layer.weight.double().T) < 6e-3
    with torch.no_grad():
        assert torch.equal(project_onto(residual, layer, input), kept)


class Products(TorchDispatchMode):
    """Shapes ``(rows, in, out)`` of the products that add to their result."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.addmm_.default:
            left, right = arguments[1:3]
            self.shapes.append((*left.shape, right.shape[1]))
        return function(*arguments, **(options or {}))


def test_a_recomputed_layer_leaves_its_last_product_out() -> None:
    base, input, down, up = problem(torch.float32, has_bias=False)
    leaves = [tensor.requires_grad_() for tensor in (input, down, up)]
    rows = ROWS * TOKENS

    def layer(input: Tensor, down: Tensor, up: Tensor) -> Tensor:
        return adapted(input, base, down, up, SCALE)

    with Products() as products:
        result = checkpoint(layer, *leaves, use_reentrant=False)
        assert products.shapes == [(rows, IN, OUT)]
        grads = torch.autograd.grad(result.sum(), leaves)
    assert products.shapes[1:] == [(rows, RANK, IN)]  # the gradient by the rows, and nothing computed again
    for ours, kept in zip(grads, torch.autograd.grad(layer(*leaves).sum(), leaves), strict=True):
        assert torch.equal(ours, kept)
