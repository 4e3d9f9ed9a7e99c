# SPDX-License-Identifier: Apache-2.0
"""The attention's GPU kernels against float64, and what they promise about bits."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.attention_triton_cases import joint_attention, relative_error
from unirl.ops import _hopper_attention, sibling_prefix_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNELS = ("hopper", "triton")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# groups, siblings, query heads, key heads, L, P, head size, ragged, size of the logits, dtype
HOPPER_CASES = [
    (1, 1, 28, 4, 1026, 64, 128, False, 1, BF16),
    (1, 2, 7, 1, 2306, 7, 128, False, 3, FP16),
    (1, 1, 7, 1, 4098, 64, 128, False, 1, BF16),
    (2, 2, 4, 4, 100, 1, 128, True, 1, FP16),
    (1, 1, 8, 1, 1, 1, 128, False, 1, BF16),
    (2, 1, 14, 2, 129, 300, 128, True, 8, BF16),
    (1, 2, 6, 2, 7, 0, 128, False, 1, FP16),
    (1, 1, 12, 4, 513, 1021, 128, False, 2, BF16),
    (3, 2, 7, 1, 385, 515, 128, True, 3, FP16),
    (1, 3, 20, 4, 321, 177, 128, False, 1, BF16),
    (1, 2, 8, 2, 513, 77, 64, False, 5, FP16),
    (2, 2, 8, 2, 300, 150, 64, True, 1, BF16),
]
# Each combination of heads, head size, dtype and raggedness is compiled, for some seconds.
TRITON_CASES = [
    (2, 1, 14, 2, 129, 300, 128, True, 8, BF16),
    (1, 2, 14, 2, 65, 0, 128, True, 1, BF16),
    (1, 2, 8, 2, 513, 77, 64, False, 5, FP16),
    (2, 2, 3, 1, 70, 33, 64, True, 2, FP32),
]
CASES = [*(("hopper", case) for case in HOPPER_CASES), *(("triton", case) for case in TRITON_CASES)]
ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-5}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make(
    groups: int,
    siblings: int,
    query_heads: int,
    key_heads: int,
    length: int,
    prefix: int,
    head_size: int,
    dtype: torch.dtype,
) -> Inputs:
    def random(rows: int, tokens: int, heads: int) -> Tensor:
        return torch.randn(rows, tokens, heads, head_size, device="cuda").to(dtype).transpose(1, 2)

    rows = groups * siblings
    return (
        random(rows, length, query_heads),
        random(rows, length, key_heads),
        random(rows, length, key_heads),
        random(groups, prefix, key_heads),
        random(groups, prefix, key_heads),
    )


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> str:
    if request.param == "hopper" and (reason := _hopper_attention.why_missing(torch.cuda.current_device())):
        pytest.skip(reason)
    return request.param


def gradients(
    inputs: Inputs, grad_out: Tensor, lengths: Tensor | None, kernel: str | None
) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out, lse = sibling_prefix_attention(*leaves, prefix_lengths=lengths, return_lse=True, backend=kernel)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize(("kernel", "case"), CASES, indirect=["kernel"], ids=str)
def test_kernels_equal_float64(case: tuple, kernel: str) -> None:
    groups, siblings, query_heads, key_heads, length, prefix, head_size, ragged, size, dtype = case
    torch.manual_seed(time.time_ns() % 2**31)  # any valid input, not a chosen one
    inputs = make(groups, siblings, query_heads, key_heads, length, prefix, head_size, dtype)
    inputs[0].mul_(size)
    inputs[1].mul_(
        torch.linspace(0.2, 2, length, device="cuda").to(dtype)[:, None]
    )  # the softmax's maximum moves
    counts = [max(prefix - 13 * group - 3, 0) if ragged else prefix for group in range(groups)]
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    wanted, wanted_lse = joint_attention(*exact, counts)
    grad_out = torch.randn(wanted.transpose(1, 2).shape, device="cuda").to(dtype).transpose(1, 2)
    grads = torch.autograd.grad(wanted, exact, grad_out.double())
    if ragged:
        for group, count in enumerate(counts):
            inputs[3][group, :, count:] = inputs[4][group, :, count:] = float("nan")
    lengths = torch.tensor(counts, device="cuda") if ragged else None
    out, lse, *got = gradients(inputs, grad_out, lengths, kernel)
    assert relative_error(out, wanted.detach()) < ERROR[dtype]
    assert float(((lse - wanted_lse.detach()).abs() / (1 + wanted_lse.detach().abs())).max()) < 1e-5
    for grad, exact_grad in zip(got, grads, strict=True):
        # With one key each, gradients are differences of nearly equal numbers: any kernel in this dtype errs more.
        assert relative_error(grad, exact_grad) < (2 if length > 1 else 10) * ERROR[dtype]


# groups, siblings, query heads, key heads, L, P, head size, ragged, dtype
OUTGROWN_CASES = [
    (1, 2, 28, 4, 515, 200, 128, False, BF16),
    (2, 1, 14, 2, 300, 301, 128, True, FP16),
    (2, 2, 8, 2, 258, 70, 64, True, BF16),
]


@pytest.mark.parametrize(
    ("kernel", "case"),
    [*(("hopper", case) for case in OUTGROWN_CASES), ("triton", OUTGROWN_CASES[-1])],
    indirect=["kernel"],
    ids=str,
)
def test_scores_may_outgrow_those_of_later_keys_by_any_power(case: tuple, kernel: str) -> None:
    groups, siblings, query_heads, key_heads, length, prefix, head_size, ragged, dtype = case
    inputs = make(groups, siblings, query_heads, key_heads, length, prefix, head_size, dtype)
    # Kernels go from the last key to the first; weights beyond 2^128 of the first reference would be infinite.
    inputs[1].mul_(torch.linspace(40, 0.2, length, device="cuda").to(dtype)[:, None])
    inputs[3].mul_(torch.linspace(90, 40, prefix, device="cuda").to(dtype)[:, None])
    counts = [prefix - 13 * group for group in range(groups)]
    lengths = torch.tensor(counts, device="cuda") if ragged else None
    exact = [tensor.double() for tensor in inputs]
    wanted, wanted_lse = joint_attention(*exact, counts if ragged else [prefix] * groups)
    out, lse = sibling_prefix_attention(*inputs, prefix_lengths=lengths, return_lse=True, backend=kernel)
    assert relative_error(out, wanted) < ERROR[dtype]
    assert float(((lse - wanted_lse).abs() / (1 + wanted_lse.abs())).max()) < 1e-5

    # A query whose scores outgrow them leaves the bits of its neighbours alone.
    mild = (0.01 * inputs[0], *inputs[1:])
    among = mild[0].clone()
    among[:, :, ::3] *= 100
    alone = sibling_prefix_attention(*mild, prefix_lengths=lengths, backend=kernel)
    mixed = sibling_prefix_attention(among, *mild[1:], prefix_lengths=lengths, backend=kernel)
    assert torch.equal(alone[:, :, 1::3], mixed[:, :, 1::3])
    assert not torch.equal(alone[:, :, ::3], mixed[:, :, ::3])


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_every_run_gives_the_same_bits(kernel: str) -> None:
    heads = (28, 4) if kernel == "hopper" else (14, 2)
    inputs = make(2, 3, *heads, 1026, 300, 128, torch.bfloat16)
    counts = torch.tensor([300, 77], device="cuda")
    grad_out = torch.randn_like(inputs[0])
    first = gradients(inputs, grad_out, counts, kernel)
    for _ in range(3):
        again = gradients(inputs, grad_out, counts, kernel)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_a_row_has_the_same_bits_alone_and_among_others(kernel: str) -> None:
    heads = (28, 4) if kernel == "hopper" else (14, 2)
    inputs = make(3, 4, *heads, 515, 200, 128, torch.bfloat16)
    counts = torch.tensor([200, 77, 150], device="cuda")
    grad_out = torch.randn_like(inputs[0])
    out, lse, *grads = gradients(inputs, grad_out, counts, kernel)
    for row, group in (
        (0, 0),
        (6, 1),
    ):  # with 132 multiprocessors, two blocks share the first row's backward pass
        alone = tuple(tensor[row : row + 1] for tensor in inputs[:3])
        prefix = tuple(tensor[group : group + 1, :, : int(counts[group])] for tensor in inputs[3:])
        one, one_lse, *one_grads = gradients((*alone, *prefix), grad_out[row : row + 1], None, kernel)
        assert torch.equal(one[0], out[row]) and torch.equal(one_lse[0], lse[row])
        for got, wanted in zip(one_grads[:3], grads[:3], strict=True):
            assert torch.equal(got[0], wanted[row])


def test_layouts_that_cannot_be_read_in_place_take_another_kernel() -> None:
    inputs = list(make(1, 2, 14, 2, 65, 30, 128, torch.bfloat16))
    wide = torch.randn(2, 2, 65, 2 * 128, device="cuda").bfloat16()
    inputs[1] = wide[..., ::2]  # the values of a head are not adjacent
    out = sibling_prefix_attention(*inputs)
    wanted, _ = joint_attention(*[tensor.double() for tensor in inputs], [30])
    assert relative_error(out, wanted) < ERROR[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_results_lie_as_a_traced_graph_expects(kernel: str) -> None:
    inputs = make(2, 2, 14, 2, 65, 30, 128, torch.bfloat16)  # tokens first in memory
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    arguments = (*leaves, torch.tensor([30, 7], device="cuda"), 0.1, kernel)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    operator = torch.ops.unirl.sibling_prefix_attention
    assert set(torch.library.opcheck(operator.default, arguments, test_utils=tests).values()) == {"SUCCESS"}
    detached = [tensor.detach() for tensor in leaves]
    out, lse = operator(*detached, *arguments[5:])
    backward = (torch.randn_like(out), *detached, out, lse, *arguments[5:])
    results = torch.library.opcheck(
        torch.ops.unirl.sibling_prefix_attention_backward.default, backward, test_utils=tests
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_empty_batches_and_prefixes_have_results_and_gradients(kernel: str) -> None:
    for groups, length, prefix in ((0, 3, 2), (1, 0, 2), (1, 65, 0)):
        leaves = [
            tensor.detach().requires_grad_() for tensor in make(groups, 2, 14, 2, length, prefix, 128, BF16)
        ]
        out = sibling_prefix_attention(*leaves, backend=kernel)
        assert out.shape == (2 * groups, 14, length, 128) and bool(out.isfinite().all())
        grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True, materialize_grads=True)
        assert all(bool(grad.isfinite().all()) for grad in grads)
