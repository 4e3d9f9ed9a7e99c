# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unirl.ops import guided_velocity

BACKENDS = ("native", "reference")
RENORMS = (None, "global", "channel", "text_channel")


def one_row_in_float64(
    cond: Tensor,
    text: Tensor | None,
    image: Tensor | None,
    s: float,
    si: float,
    renorm: str | None,
    low: float,
) -> Tensor:
    """The formulas for one row without padding, [seq, C]."""
    cond = cond.double()
    text_only = cond if text is None else text.double() + s * (cond - text.double())
    scaled = (text is not None and s != 1) or (image is not None and si != 1)

    def factor(vector: Tensor, dims: tuple[int, ...]) -> Tensor:
        ratio = cond.norm(dim=dims, keepdim=True) / (vector.norm(dim=dims, keepdim=True) + 1e-8)
        return ratio.clamp(min=low, max=1.0)

    if renorm == "text_channel" and text is not None and s != 1:
        text_only = text_only * factor(text_only, (1,))
    guided = text_only if image is None else image.double() + si * (text_only - image.double())
    if renorm == "channel" and scaled:
        guided = guided * factor(guided, (1,))
    if renorm == "global" and scaled:
        guided = guided * factor(guided, (0, 1))
    return guided


@pytest.mark.parametrize("backend", BACKENDS)
def test_global_renorm_is_taken_over_each_row_alone(backend: str) -> None:
    cond = torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]])
    guided = guided_velocity(
        cond, torch.zeros_like(cond), None, torch.tensor([4.0, 0.4]), 1.0, renorm="global", backend=backend
    )
    expected = torch.tensor([[[3.0, 4.0]], [[0.12, 0.16]]])
    torch.testing.assert_close(guided, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renorm", RENORMS)
@pytest.mark.parametrize("branches", ["text", "image", "both", "neither"])
@pytest.mark.parametrize("low", [0.0, 0.97])
def test_guidance_follows_the_formulas(renorm: str | None, branches: str, low: float, backend: str) -> None:
    cond, text, image = torch.randn(3, 4, 6, 37).unbind(0)
    text_branch = text if branches in ("text", "both") else None
    image_branch = image if branches in ("image", "both") else None
    scales = torch.tensor([4.0, 1.0, 0.5, 2.0]), torch.tensor([1.5, 1.0, 1.2, 1.0])
    guided = guided_velocity(
        cond, text_branch, image_branch, *scales, renorm=renorm, renorm_min=low, backend=backend
    )
    for row in range(4):
        expected = one_row_in_float64(
            cond[row],
            None if text_branch is None else text[row],
            None if image_branch is None else image[row],
            float(scales[0][row]),
            float(scales[1][row]),
            renorm,
            low,
        )
        torch.testing.assert_close(guided[row].double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renorm", RENORMS)
def test_scale_one_returns_the_conditional_velocity_bit_for_bit(renorm: str | None, backend: str) -> None:
    cond, text, image = torch.randn(3, 2, 5, 7).unbind(0)
    guided = guided_velocity(cond, text, image, 1.0, 1.0, renorm=renorm, backend=backend)
    assert torch.equal(guided, cond)
    one_branch = guided_velocity(cond, text, image, 3.0, torch.ones(2), renorm=renorm, backend=backend)
    assert torch.equal(
        one_branch, guided_velocity(cond, text, None, 3.0, 9.0, renorm=renorm, backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renorm", RENORMS)
def test_a_row_never_depends_on_its_neighbours_or_padding(renorm: str | None, backend: str) -> None:
    lengths = [1, 9, 0, 20, 33]
    cond, text, image = torch.randn(3, 5, 33, 12).unbind(0)
    scales = torch.tensor([4.0, 1.0, 2.0, 0.5, 3.0]), torch.tensor([1.0, 1.5, 2.0, 1.0, 1.3])

    def run(rows: slice, size: int, counts: list[int] | None) -> list[Tensor]:
        leaves = [branch[rows, :size].clone().requires_grad_() for branch in (cond, text, image)]
        if counts is not None:
            with torch.no_grad():
                for leaf in leaves:
                    for row, count in enumerate(counts):
                        leaf[row, count:] = torch.nan
        out = guided_velocity(
            *leaves, scales[0][rows], scales[1][rows], renorm=renorm, lengths=counts, backend=backend
        )
        grads = torch.autograd.grad((out**2).sum(), leaves)
        return [out.detach(), *grads]

    padded = run(slice(0, 5), 33, lengths)
    for row, length in enumerate(lengths):
        alone = run(slice(row, row + 1), length, None)
        for whole, single in zip(padded, alone, strict=True):
            assert torch.equal(whole[row, :length], single[0])
            assert float(whole[row, length:].abs().sum()) == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 3),
    seq=st.integers(0, 6),
    channels=st.sampled_from([0, 1, 3, 64, 300]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    renorm=st.sampled_from(RENORMS),
    branches=st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
    ragged=st.booleans(),
    strided=st.booleans(),
)
def test_native_guidance_and_gradient_equal_the_reference(
    rows: int,
    seq: int,
    channels: int,
    dtype: torch.dtype,
    renorm: str | None,
    branches: tuple[bool, bool],
    ragged: bool,
    strided: bool,
) -> None:
    generator = torch.Generator().manual_seed(channels + seq)
    leaves = [torch.randn(rows, seq, channels, generator=generator).to(dtype) for _ in range(3)]
    if strided:
        leaves = [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    text = leaves[1] if branches[0] else None
    image = leaves[2] if branches[1] else None
    used = [leaf for leaf in (leaves[0], text, image) if leaf is not None]
    scale = torch.rand(rows, generator=generator) * 4
    lengths = torch.randint(0, seq + 1, (rows,), generator=generator) if ragged else None
    upstream = torch.randn(rows, seq, channels, generator=generator).to(dtype)
    results = []
    for backend in BACKENDS:
        out = guided_velocity(
            leaves[0],
            text,
            image,
            scale,
            1.5,
            renorm=renorm,
            renorm_min=0.2,
            lengths=lengths,
            backend=backend,
        )
        results.append((out.detach(), *torch.autograd.grad(out, used, upstream)))
    for index, (native, reference) in enumerate(zip(*results, strict=True)):
        if index == 0 and dtype is not torch.float64:
            assert torch.equal(native, reference)
        else:
            wide = dtype in (torch.float32, torch.float64)
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if wide else {"rtol": 3e-2, "atol": 3e-2}
            torch.testing.assert_close(native, reference, **tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renorm", RENORMS)
def test_gradient_in_float64(renorm: str | None, backend: str) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def function(cond: Tensor, text: Tensor, image: Tensor) -> Tensor:
        return guided_velocity(
            cond,
            text,
            image,
            torch.tensor([4.0, 0.3, 1.0]),
            torch.tensor([1.5, 1.0, 2.0]),
            renorm=renorm,
            lengths=[2, 1, 2],
            backend=backend,
        )

    assert torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("renorm", RENORMS)
def test_zero_velocities_give_zero_and_finite_gradients(renorm: str | None, backend: str) -> None:
    leaves = [torch.zeros(1, 2, 3, requires_grad=True) for _ in range(3)]
    out = guided_velocity(*leaves, 4.0, 1.5, renorm=renorm, backend=backend)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert float(out.detach().abs().max()) == 0 and all(bool(grad.isfinite().all()) for grad in grads)


def test_bad_arguments_are_named() -> None:
    cond = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="renorm is 'token'; allowed: None, 'global'"):
        guided_velocity(cond, cond, None, 1.0, 1.0, renorm="token")
    with pytest.raises(ValueError, match="renorm_min is 2"):
        guided_velocity(cond, cond, None, 1.0, 1.0, renorm_min=2)
    with pytest.raises(ValueError, match="cond has 2 axes"):
        guided_velocity(cond[0], None, None, 1.0, 1.0)
    with pytest.raises(ValueError, match="image_uncond has shape"):
        guided_velocity(cond, None, cond[:1], 1.0, 1.0)
    with pytest.raises(ValueError, match="text_uncond has dtype bfloat16"):
        guided_velocity(cond, cond.bfloat16(), None, 1.0, 1.0)
    with pytest.raises(ValueError, match="text_scale has shape"):
        guided_velocity(cond, cond, None, torch.ones(3), 1.0)
    for scale, message in (
        (float("nan"), "text_scale is nan; it must be finite"),
        (torch.tensor([1.0, torch.inf]), "text_scale is inf in row 1; it must be finite"),
        (torch.tensor(torch.nan), "text_scale is nan in row 0"),
        (torch.tensor([1j, 2.0]), "text_scale has dtype complex64"),
        (torch.ones(2, requires_grad=True), "text_scale requires a gradient"),
        ([1.0, 2.0], "text_scale must be a number or a tensor"),
        (True, "text_scale must be a number or a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            guided_velocity(cond, cond, None, scale, 1.0)
    with pytest.raises(ValueError, match="renorm_min is 'low'"):
        guided_velocity(cond, cond, None, 1.0, 1.0, renorm_min="low")
    for lengths, message in (
        ([1, 4], "lengths holds 4; allowed: 0 to 3 tokens"),
        ([-1, 2], "lengths holds -1"),
        ([1.5, 2], "a value of lengths is 1.5; allowed: an integer"),
        (2, "lengths is 2; expected a list of integers"),
        (torch.tensor(2), "lengths has shape"),
        (torch.tensor([1.0, 2.0]), "lengths has dtype float32; allowed: int64, int32"),
    ):
        with pytest.raises(ValueError, match=message):
            guided_velocity(cond, cond, None, 1.0, 1.0, lengths=lengths)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_and_expanded_branches_and_scales_of_any_form_give_the_same_bits(backend: str) -> None:
    cond, text = torch.randn(2, 3, 5, 7).unbind(0)
    one = torch.randn(1, 1, 7).expand(3, 5, 7)
    for branches in ((cond, cond, cond), (one, text, one), (cond, one, text)):
        copies = [branch.clone(memory_format=torch.contiguous_format) for branch in branches]
        expected = guided_velocity(*copies, torch.full((3,), 3.0), 2.0, renorm="channel", backend=backend)
        for scale in (3, 3.0, torch.tensor(3), torch.tensor([3.0]).expand(3), torch.full((6,), 3.0)[::2]):
            got = guided_velocity(*branches, scale, torch.tensor(2.0), renorm="channel", backend=backend)
            assert torch.equal(got, expected) and got.is_contiguous()
