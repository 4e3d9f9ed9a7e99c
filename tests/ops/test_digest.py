# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.ops import layout_digest, tensor_digest

BACKENDS = ("native", "reference")
MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


KEYS = [mix64((index + 1) * 0x9E3779B97F4A7C15 & MASK) for index in range(131)]


def sums_of_words(words: list[int]) -> list[int]:
    """The documented construction in Python integers."""
    low, sums = 0xFFFFFFFF, [0, 0]
    for tile in range(0, len(words), 128):
        lanes = [0, 0, 0, 0]
        for index, word in enumerate(words[tile : tile + 128]):
            for lane in range(4):
                key = KEYS[index + lane]
                lanes[lane] += (((word & low) + (key & low)) & low) * (((word >> 32) + (key >> 32)) & low)
        for side, salt in enumerate((0xD6E8FEB86659FD93, 0xA0761D6478BD642F)):
            inner = mix64((lanes[side] + salt * (tile // 128 + 1)) & MASK)
            sums[side] += mix64((inner + lanes[side + 2]) & MASK)
    return sums


def expected_row(values: list[int]) -> list[int]:
    sums = sums_of_words([value & MASK for value in values])
    salts = (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3)
    digest = [
        mix64((total + mix64((len(values) + 1) * salt & MASK)) & MASK)
        for total, salt in zip(sums, salts, strict=True)
    ]
    return [value - (1 << 64) if value >> 63 else value for value in digest]


def expected_tensor(tensor: torch.Tensor) -> list[int]:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    data += b"\0" * (-len(data) % 8)
    words = list(struct.unpack(f"<{len(data) // 8}Q", data))
    name = str(tensor.dtype).removeprefix("torch.")
    text = f"{name}|{','.join(map(str, tensor.shape))}".encode()
    header = struct.unpack("<2Q", hashlib.blake2b(text, digest_size=16).digest())
    digest = [mix64((total + word) & MASK) for total, word in zip(sums_of_words(words), header, strict=True)]
    return [value - (1 << 64) if value >> 63 else value for value in digest]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [0, 1, 5, 16, 127, 128, 129, 300])
def test_layout_digest_is_the_documented_construction(size: int, backend: str) -> None:
    values = torch.randint(-(2**63), 2**63 - 1, (3, size))
    digest = layout_digest(values, backend=backend)
    assert digest.tolist() == [expected_row(row) for row in values.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(35, dtype=torch.float32).reshape(5, 7),
        torch.arange(1000, dtype=torch.int16),
        torch.randn(131, 3, dtype=torch.bfloat16),
        torch.randn(2, 1, 0),
        torch.tensor(3.5, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.randn(33, 44, dtype=torch.complex64),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_tensor_digest_is_the_documented_construction(tensor: torch.Tensor, backend: str) -> None:
    assert tensor_digest([tensor], backend=backend).tolist() == [expected_tensor(tensor)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_rows_have_the_digests_of_the_same_rows_in_a_matrix(backend: str) -> None:
    values = torch.randint(-100, 100, (6, 5))
    ragged = layout_digest(values.flatten(), [0, 5, 10, 15, 20, 25, 30], backend=backend)
    assert torch.equal(ragged, layout_digest(values, backend=backend))
    with_gaps = layout_digest(torch.arange(9), torch.tensor([0, 4, 4, 9]), backend=backend)
    assert with_gaps.tolist() == [expected_row([0, 1, 2, 3]), expected_row([]), expected_row([4, 5, 6, 7, 8])]


def distinct(tensors: list[torch.Tensor], backend: str) -> bool:
    digests = {tuple(row) for row in tensor_digest(tensors, backend=backend).tolist()}
    return len(digests) == len(tensors)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reordered_rows_shapes_dtypes_signs_of_zero_and_nan_payloads_differ(backend: str) -> None:
    rows = torch.randn(4, 6)
    assert distinct([rows, rows[[1, 0, 2, 3]], rows.t().contiguous()], backend)
    assert distinct([rows, rows.reshape(6, 4), rows.reshape(24), rows.reshape(1, 24)], backend)
    bits = torch.arange(8, dtype=torch.int32)
    assert distinct([bits, bits.view(torch.float32), bits.view(torch.int16).view(torch.bfloat16)], backend)
    assert distinct([torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), torch.tensor([-0.0, 0.0])], backend)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert distinct([nans[:1], nans[1:]], backend)
    # Two flips of the highest bit, and two rows that only trade their halves.
    flipped = rows.clone()
    flipped[0, :2] = -flipped[0, :2]
    assert distinct([rows, flipped], backend)
    assert distinct([torch.tensor([1 << 32]), torch.tensor([1])], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_single_bit_changes_both_words(backend: str) -> None:
    base = torch.randint(-(2**62), 2**62, (1, 20))
    flips = torch.ones(20 * 64, 1, dtype=torch.int64) * base
    for position in range(20):
        for bit in range(64):
            flips[64 * position + bit, position] ^= 1 << bit if bit < 63 else -(2**63)
    digests = layout_digest(flips, backend=backend)
    origin = layout_digest(base, backend=backend)
    assert bool((digests != origin).all())
    assert torch.unique(digests, dim=0).shape[0] == flips.shape[0]
    changed = np.bitwise_count((digests ^ origin).numpy().view(np.uint64)).mean()
    assert 31.5 < changed < 32.5  # half of the bits of a word


def test_small_counters_do_not_collide() -> None:
    grid = torch.cartesian_prod(torch.arange(64), torch.arange(64), torch.arange(64))
    digests = layout_digest(grid)
    for word in (0, 1):
        assert torch.unique(digests[:, word]).numel() == grid.shape[0]


def test_strides_and_threads_do_not_enter() -> None:
    wide = torch.randint(0, 1000, (50, 40))
    part = wide[::2, 3:20]
    assert torch.equal(layout_digest(part), layout_digest(part.clone()))
    assert torch.equal(layout_digest(wide.t()), layout_digest(wide.t().contiguous()))
    weights = torch.randn(300, 500)
    assert torch.equal(tensor_digest([weights.t()]), tensor_digest([weights.t().contiguous()]))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = tensor_digest([weights]), layout_digest(wide)
        torch.set_num_threads(3)
        assert torch.equal(tensor_digest([weights]), one[0])
        assert torch.equal(layout_digest(wide), one[1])
    finally:
        torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=140), max_size=5))
def test_native_and_reference_agree_on_any_rows(rows: list[list[int]]) -> None:
    values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    native = layout_digest(values, offsets, backend="native")
    assert torch.equal(native, layout_digest(values, offsets, backend="reference"))
    assert native.shape == (len(rows), 2)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 12), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]),
    layout=st.sampled_from(["contiguous", "transposed", "offset", "every second", "expanded"]),
)
def test_native_reference_and_the_construction_agree_on_any_tensor(
    shape: list[int], dtype: torch.dtype, layout: str
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randint(-100, 100, (*shape, 4), generator=generator).to(dtype)
    if layout == "transposed":
        values = values.transpose(0, -1)
    elif layout == "offset":
        values = values[..., 1:]
    elif layout == "every second":
        values = values[..., ::2]
    elif layout == "expanded":
        values = values[..., :1].expand(*shape, 3)
    digest = tensor_digest([values], backend="native")
    assert torch.equal(digest, tensor_digest([values], backend="reference"))
    assert digest.tolist() == [expected_tensor(values)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_conjugate_and_negative_views_are_read_as_what_they_stand_for(backend: str) -> None:
    values = torch.randn(3, 5, dtype=torch.complex64)
    for view in (values.conj(), values.conj().imag):
        plain = view.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(tensor_digest([view], backend=backend), tensor_digest([plain], backend=backend))


def test_bad_arguments_are_named() -> None:
    values = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="values has dtype int32"):
        layout_digest(values.int())
    with pytest.raises(ValueError, match="values has 1 axes"):
        layout_digest(values[0])
    with pytest.raises(ValueError, match="offsets must start with 0 and end with"):
        layout_digest(values[0], [0, 2])
    with pytest.raises(ValueError, match="offsets must not fall"):
        layout_digest(values[0], [0, 2, 1, 3])
    with pytest.raises(ValueError, match=r"tensors\[1\] must be a torch.Tensor"):
        tensor_digest([values, [1, 2]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="tensors is one Tensor; expected a list of tensors"):
        tensor_digest(values)
    with pytest.raises(ValueError, match=r"tensors\[1\] is on meta, tensors\[0\] is on cpu"):
        tensor_digest([values, values.to("meta")])
    for offsets, message in (
        ([0, 1.5, 3], "a value of offsets is 1.5; allowed: an integer"),
        (3, "offsets is 3; expected a list of integers"),
        (torch.tensor([[0, 3]]), "offsets has 2 axes"),
        ([], "offsets must start with 0 and end with the number of values, 3; got none"),
        ([0, -1, 3], "offsets must not fall; -1 follows 0"),
    ):
        with pytest.raises(ValueError, match=message):
            layout_digest(values[0], offsets)
    assert tensor_digest([]).shape == (0, 2)
