# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.ops import pad_latents, trim_latents

BACKENDS = ("native", "reference")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(-100, 100, shape).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    frames=st.integers(0, 3),
    channels=st.integers(0, 5),
    extra=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    stride=st.sampled_from(["contiguous", "tokens", "channels", "frames", "expanded"]),
    backend=st.sampled_from(BACKENDS),
)
def test_trim_undoes_pad_bit_for_bit(
    lengths: list[int],
    frames: int,
    channels: int,
    extra: int,
    dtype: torch.dtype,
    stride: str,
    backend: str,
) -> None:
    rows = []
    for length in lengths:
        if stride == "tokens":
            row = random_bits((frames, 2 * length, channels), dtype)[:, ::2]
        elif stride == "channels":
            row = random_bits((frames, channels, length), dtype).transpose(1, 2)
        elif stride == "frames":
            row = random_bits((length, frames, channels), dtype).transpose(0, 1)
        elif stride == "expanded":
            row = random_bits((1, length, channels), dtype).expand(frames, length, channels)
        else:
            row = random_bits((frames, length, channels), dtype)
        rows.append(row)
    bound = max(lengths) + extra
    padded = pad_latents(rows, bound, backend=backend)
    peer = torch.stack([F.pad(row.to(torch.float64), (0, 0, 0, bound - row.shape[1])) for row in rows])
    assert padded.dtype is dtype and torch.equal(padded.to(torch.float64), peer)
    trimmed = trim_latents(padded, lengths, backend=backend)
    assert all(
        part.is_contiguous() and torch.equal(part, row) for part, row in zip(trimmed, rows, strict=True)
    )
    # A strided padded tensor: frames stored outermost.
    strided = padded.transpose(0, 1).contiguous().transpose(0, 1)
    again = trim_latents(strided, lengths, backend=backend)
    assert all(torch.equal(part, row) for part, row in zip(again, rows, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_payloads_and_signed_zeros_survive(backend: str) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1], dtype=torch.int32)
    row = bits.view(torch.float32).reshape(1, 4, 1)
    padded = pad_latents([row, row[:, :1]], backend=backend)
    back = trim_latents(padded, [4, 1], backend=backend)
    assert torch.equal(back[0].view(torch.int32).flatten(), bits)
    assert int(padded[1, 0, 1:].view(torch.int32).abs().max()) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_in_float64(backend: str) -> None:
    rows = [torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True) for length in (2, 0, 1)]
    assert torch.autograd.gradcheck(lambda *parts: pad_latents(parts, 3, backend=backend), rows)
    latents = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda whole: trim_latents(whole, [3, 1], backend=backend), [latents])


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugate_and_negative_views_are_read_as_what_they_stand_for(backend: str) -> None:
    values = torch.randn(2, 3, 4, dtype=torch.complex64)
    assert torch.equal(pad_latents([values.conj()], backend=backend)[0], values.conj().resolve_conj())
    assert torch.equal(pad_latents([values.conj().imag], backend=backend)[0], -values.imag)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_is_the_backward_of_the_other(backend: str) -> None:
    rows = [torch.randn(2, length, 3, requires_grad=True) for length in (4, 1, 0, 6)]
    padded = pad_latents(rows, 7, backend=backend)
    upstream = torch.randn_like(padded)
    grads = torch.autograd.grad(padded, rows, upstream)
    for grad, row, part in zip(grads, rows, upstream, strict=True):
        assert torch.equal(grad, part[:, : row.shape[1]])
    latents = padded.detach().requires_grad_()
    parts = trim_latents(latents, [4, 1, 0, 6], backend=backend)
    upstreams = [torch.randn_like(part) for part in parts]
    (grad,) = torch.autograd.grad(parts, latents, upstreams)
    assert torch.equal(grad, pad_latents(upstreams, 7, backend="reference"))


def test_lengths_may_be_a_tensor_and_threads_do_not_enter() -> None:
    latents = torch.randn(6, 3, 500, 16)
    lengths = torch.tensor([500, 0, 7, 499, 250, 1])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        rows = trim_latents(latents, lengths)
        assert torch.equal(pad_latents(rows, 500), pad_latents(rows, 500, backend="reference"))
    finally:
        torch.set_num_threads(before)


def test_bad_arguments_are_named() -> None:
    row = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match="rows is empty"):
        pad_latents([])
    with pytest.raises(ValueError, match=r"rows\[1\] has 2 axes"):
        pad_latents([row, row[0]])
    with pytest.raises(ValueError, match=r"rows\[1\] has shape \(2, 3, 5\)"):
        pad_latents([row, torch.zeros(2, 3, 5)])
    with pytest.raises(ValueError, match=r"rows\[1\] has dtype float64"):
        pad_latents([row, row.double()])
    with pytest.raises(ValueError, match=r"rows\[0\] has 3 tokens, more than pad_to = 2"):
        pad_latents([row], 2)
    latents = torch.zeros(2, 2, 3, 4)
    with pytest.raises(ValueError, match="latents has 3 axes"):
        trim_latents(row, [1])
    with pytest.raises(ValueError, match="lengths has 1 values; latents has 2 rows"):
        trim_latents(latents, [1])
    with pytest.raises(ValueError, match=r"rows\[1\] is on meta, rows\[0\] is on cpu"):
        pad_latents([row, row.to("meta")])
    with pytest.raises(ValueError, match=r"pad_to is 5\.5; allowed: an integer"):
        pad_latents([row], 5.5)  # type: ignore[arg-type]
    for lengths, message in (
        ([3, 4], r"lengths\[1\] is 4; allowed: 0 to 3"),
        ([-1, 3], r"lengths\[0\] is -1"),
        ([1.5, 2], "a value of lengths is 1.5; allowed: an integer"),
        (["1", "2"], "a value of lengths is '1'"),
        (2, "lengths is 2; expected a list of integers"),
        (torch.tensor(2), "lengths has 0 axes"),
        (torch.tensor([1.0, 2.0]), "lengths has dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            trim_latents(latents, lengths)
    assert trim_latents(latents[:0], []) == []
