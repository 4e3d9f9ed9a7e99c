# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from unirl.ops import _eager_packing, pad_latents, trim_latents

BACKENDS = ("native", "reference")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)
EXOTIC_DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint64,
    torch.complex128,
)


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
    assert torch.autograd.gradgradcheck(lambda *parts: pad_latents(parts, 3, backend=backend) ** 2, rows)
    latents = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)

    def trimmed(whole: torch.Tensor) -> list[torch.Tensor]:
        return trim_latents(whole, [3, 1], backend=backend)

    assert torch.autograd.gradcheck(trimmed, [latents])
    assert torch.autograd.gradgradcheck(lambda whole: tuple(part**2 for part in trimmed(whole)), [latents])


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


@pytest.mark.parametrize("dtype", EXOTIC_DTYPES, ids=str)
def test_bytes_are_moved_whatever_the_dtype(dtype: torch.dtype) -> None:
    rows = [random_bits((2, n, 4 * dtype.itemsize), torch.uint8).view(dtype) for n in (3, 0, 5)]
    padded = pad_latents(rows, 6)
    assert padded.dtype is dtype
    for index, (row, part) in enumerate(zip(rows, trim_latents(padded, [3, 0, 5]), strict=True)):
        length = row.shape[1]
        assert torch.equal(part.view(torch.uint8), row.view(torch.uint8))
        assert torch.equal(padded[index, :, :length].view(torch.uint8), row.view(torch.uint8))
        assert not padded[index, :, length:].view(torch.uint8).any()


def test_the_gradient_of_some_rows_may_be_asked_for() -> None:
    rows = [torch.randn(2, length, 3, requires_grad=length > 1) for length in (1, 4)]
    upstream = torch.randn(2, 2, 4, 3)
    (grad,) = torch.autograd.grad(pad_latents(rows), rows[1], upstream)
    assert torch.equal(grad, upstream[1])
    latents = torch.randn(2, 2, 4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(trim_latents(latents, [3, 2])[1], latents, upstream[1, :, :2])
    assert torch.equal(grad[1, :, :2], upstream[1, :, :2])
    assert not grad[0].any() and not grad[1, :, 2:].any()


def test_every_row_has_memory_of_its_own() -> None:
    latents = torch.randn(6, 2, 5, 3)
    rows = trim_latents(latents, [4, 4, 2, 4, 2, 5])
    storages = [row.untyped_storage() for row in rows]
    assert len({storage.data_ptr() for storage in storages}) == len(rows)
    assert [storage.nbytes() for storage in storages] == [row.nbytes for row in rows]


def python_calls(function: Callable[[], Any]) -> int:
    """How many functions written in Python a call enters."""
    entered = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        entered += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered


def test_no_python_function_is_called_for_each_row() -> None:
    counts = {}
    for num_rows in (10, 100):
        lengths = [2, 3, 5, 2, 3] * (num_rows // 5)
        rows = [torch.zeros(2, length, 4) for length in lengths]
        padded = torch.zeros(num_rows, 2, 5, 4)
        calls = (
            lambda rows=rows: pad_latents(rows, 5),
            lambda padded=padded, lengths=lengths: trim_latents(padded, lengths),
        )
        counts[num_rows] = [python_calls(call) for call in calls]
    assert counts[10] == counts[100] and max(counts[10]) < 60


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 5, 1), (1, 1, 3), (0, 5, 3), (2, 5, 0)])
def test_trimmed_rows_have_the_strides_of_new_tensors(shape: tuple[int, int, int], backend: str) -> None:
    lengths = [*range(shape[1] + 1)] * 2
    rows = trim_latents(torch.zeros(len(lengths), *shape), lengths, backend=backend)
    for row, length in zip(rows, lengths, strict=True):
        fresh = torch.empty(shape[0], length, shape[2])
        assert (row.shape, row.stride()) == (fresh.shape, fresh.stride())


def test_results_stay_on_the_device_of_the_rows_whatever_the_default_device() -> None:
    rows = [torch.randn(2, length, 3) for length in (4, 1)]
    with torch.device("meta"):
        padded = pad_latents(rows)
        parts = trim_latents(padded, [4, 1])
    assert padded.device.type == "cpu"
    assert all(map(torch.equal, parts, rows))


@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_stands_for_zeros_is_zeros(place: int) -> None:
    rows = [torch.ones(2, 3, 4), torch.ones(2, 3, 4)]
    rows[place] = torch._efficientzerotensor((2, 3, 4))
    padded = pad_latents(rows, 5)
    assert not padded[place].any() and padded[1 - place, :, :3].all()
    assert not any(row.any() for row in trim_latents(torch._efficientzerotensor((2, 2, 3, 4)), [3, 2]))


def test_no_frames_of_any_strides() -> None:
    rows = [torch.empty_strided((0, length, 3), (1, 1, 2)) for length in (2, 1)]
    assert pad_latents(rows, 4).shape == (2, 0, 4, 3)
    latents = torch.empty_strided((2, 0, 4, 3), (1, 1, 1, 2))
    assert [row.shape for row in trim_latents(latents, [2, 1])] == [(0, 2, 3), (0, 1, 3)]


def test_a_tensor_that_stands_for_another_one_is_refused() -> None:
    latents = torch._to_functional_tensor(torch.ones(2, 2, 3, 4))
    with pytest.raises(ValueError, match="without memory"):
        trim_latents(latents, [3, 2])
    with pytest.raises(ValueError, match="without memory"):
        pad_latents([torch.ones(2, 3, 4), latents[0]])


@pytest.mark.parametrize("name", ["_len_torch_dispatch_stack", "_len_torch_function_stack"])
def test_a_torch_that_cannot_say_who_watches_gets_the_operator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [torch.randn(2, length, 3, requires_grad=True) for length in (4, 1)]
    monkeypatch.delattr(torch._C, name)
    assert not _eager_packing._nobody_watches()
    padded = pad_latents(rows)
    assert torch.equal(padded, pad_latents(rows, backend="reference"))
    assert all(map(torch.equal, trim_latents(padded, [4, 1]), rows))


class Recorder(TorchDispatchMode):
    """Names of the operators that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_what_watches_operators_sees_packing() -> None:
    rows = [torch.randn(2, length, 3) for length in (4, 1)]
    padded, expected = pad_latents(rows), pad_latents(rows, backend="reference")
    names = ["unirl::pad_latents", "unirl::trim_latents"]
    assert torch.equal(padded, expected)
    with Recorder() as mode:
        parts = trim_latents(pad_latents(rows), [4, 1])
    assert mode.names == names and all(map(torch.equal, parts, rows))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trim_latents(pad_latents(rows), [4, 1])
    assert {*names} <= {event.name for event in profile.events()}
    with FakeTensorMode() as fake:
        hollow = pad_latents([fake.from_tensor(row) for row in rows])
        assert [part.shape for part in trim_latents(hollow, [4, 1])] == [row.shape for row in rows]
    assert isinstance(hollow, FakeTensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_packing_is_captured_in_a_cuda_graph() -> None:
    lengths = [5, 0, 300, 7] * 40
    rows = [torch.randn(2, length, 8, device="cuda") for length in lengths]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        padded = pad_latents(rows, 301)
        parts = trim_latents(padded, lengths)
    for row in rows:
        row.normal_()
    graph.replay()
    assert torch.equal(padded, pad_latents(rows, 301, backend="reference"))
    assert all(map(torch.equal, parts, rows))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_frames_than_a_grid_has_layers() -> None:
    rows = [torch.randn(70_000, length, 2, device="cuda") for length in (3, 1)]
    padded = pad_latents(rows, 4)
    assert torch.equal(padded, pad_latents(rows, 4, backend="reference"))
    assert all(map(torch.equal, trim_latents(padded, [3, 1]), rows))


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
