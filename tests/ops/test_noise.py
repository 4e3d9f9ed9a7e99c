# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.ops import keyed_normal, row_key

BACKENDS = ("native", "reference")


def philox_words(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in Python integers, after Salmon et al., SC 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def mix64(value: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014)."""
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def test_philox_gives_the_published_words() -> None:
    # Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    assert philox_words((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox_words((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_box_muller_of_philox_in_float64(backend: str) -> None:
    seed, row, step, stream = 2**63 + 5, -12345, 7, 3
    key = mix64(mix64(seed) ^ (row & (2**64 - 1)))
    expected = []
    for block in range(200):
        words = philox_words((block, 0, step, stream), (key & 0xFFFFFFFF, key >> 32))
        for radius_word, angle_word in (words[:2], words[2:]):
            radius = math.sqrt(-2 * math.log((radius_word + 0.5) / 2**32))
            quadrant, low = angle_word >> 30, angle_word & 0x3FFFFFFF
            angle = math.pi / 2 * (quadrant + (low - 2**29 + 0.5) / 2**30)
            expected += [radius * math.cos(angle), radius * math.sin(angle)]
    noise = keyed_normal((1, 800), seed=seed, row_keys=[row], step=step, stream=stream, backend=backend)
    torch.testing.assert_close(noise[0].double(), torch.tensor(expected).double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("length", [1, 3, 4, 10, 16, 64, 255, 256, 257, 1000])
def test_native_noise_equals_the_reference_bit_for_bit(length: int) -> None:
    ids = [f"r1.p{i}/2" for i in range(5)]
    arguments = {"seed": 11, "row_keys": ids, "step": 4}
    native = keyed_normal((5, length), **arguments, backend="native")
    assert torch.equal(native, keyed_normal((5, length), **arguments, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [4, 10, 16, 64])
def test_moving_a_row_keeps_its_bits(length: int, backend: str) -> None:
    ids = [f"r0.p{i // 4}/{i % 4}" for i in range(12)]

    def draw(rows: list[int], size: int) -> torch.Tensor:
        keys = [ids[row] for row in rows]
        return keyed_normal((len(rows), size), seed=1, row_keys=keys, step=2, backend=backend)

    batch = draw(list(range(12)), length)
    for row in (0, 5, 11):
        assert torch.equal(draw([row], length)[0], batch[row])
        # A longer row begins with the shorter one: padding does not change noise.
        assert torch.equal(draw([3, row], length + 7)[1, :length], batch[row])
    order = torch.randperm(12).tolist()
    assert torch.equal(draw(order, length), batch[order])


def test_threads_do_not_change_bits() -> None:
    arguments = {"seed": 1, "row_keys": list(range(64)), "step": 0}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = keyed_normal((64, 4096), **arguments)
        torch.set_num_threads(3)
        assert torch.equal(keyed_normal((64, 4096), **arguments), one)
    finally:
        torch.set_num_threads(before)


def test_moments_and_tails_are_normal_to_six_sigma() -> None:
    noise = keyed_normal((256, 1 << 14), seed=3, row_keys=list(range(256)), step=0).flatten().double()
    count = noise.numel()  # 2^22
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = float((noise**power).mean()) - moment
        assert abs(error) < 5 * math.sqrt(variance / count), f"moment {power}"
    for bound in (1.0, 2.0, 3.0, 4.0, 4.5):
        expected = math.erfc(bound / math.sqrt(2)) * count
        seen = int((noise.abs() > bound).sum())
        assert abs(seen - expected) < 5 * math.sqrt(expected) + 1, f"beyond {bound}"


@pytest.mark.slow
def test_tails_beyond_six_sigma_have_the_normal_probability() -> None:
    # P(|z| > 5) = 5.7e-7 and P(|z| > 6) = 2e-9; a float32 uniform of 24 bits would stop at 5.8.
    beyond = {5.0: 0, 5.5: 0, 6.0: 0}
    count = 0
    for step in range(16):
        noise = keyed_normal((256, 1 << 17), seed=9, row_keys=list(range(256)), step=step)
        count += noise.numel()
        tail = noise[noise.abs() > 5.0].abs()
        for bound in beyond:
            beyond[bound] += int((tail > bound).sum())
    for bound, seen in beyond.items():
        expected = math.erfc(bound / math.sqrt(2)) * count
        assert abs(seen - expected) < 5 * math.sqrt(expected) + 1, f"beyond {bound}: {seen}, {expected}"


def test_every_quadrant_and_sign_is_drawn_evenly() -> None:
    noise = keyed_normal((1, 1 << 18), seed=0, row_keys=[0], step=0)[0].view(-1, 2)
    quadrant = (noise[:, 0] > 0).int() * 2 + (noise[:, 1] > 0).int()
    counts = torch.bincount(quadrant, minlength=4).double()
    expected = noise.shape[0] / 4
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1  # chi-square, 3 degrees, p = 1e-4


def test_keys_steps_streams_and_seeds_are_independent() -> None:
    size = 1 << 16
    variants = [
        keyed_normal((1, size), seed=seed, row_keys=[row], step=step, stream=stream)[0].double()
        for seed, row, step, stream in (
            (1, 5, 0, 0),
            (1, 6, 0, 0),
            (1, 5, 1, 0),
            (1, 5, 0, 1),
            (2, 5, 0, 0),
            (1, 5 - 2**63, 0, 0),
        )
    ]
    variants.append(torch.roll(variants[0], 1))
    correlation = torch.corrcoef(torch.stack(variants)) - torch.eye(len(variants), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(size)


def test_row_key_is_the_little_endian_blake2b_of_the_id() -> None:
    import hashlib

    digest = hashlib.blake2b(b"r12.p7/3", digest_size=8).digest()
    assert row_key("r12.p7/3") == int.from_bytes(digest, "little", signed=True)
    named = keyed_normal((1, 8), seed=0, row_keys=["r12.p7/3"], step=0)
    assert torch.equal(named, keyed_normal((1, 8), seed=0, row_keys=[row_key("r12.p7/3")], step=0))


def test_dtypes_round_the_same_float32_noise() -> None:
    arguments = {"seed": 0, "row_keys": [1, 2], "step": 0}
    single = keyed_normal((2, 300), **arguments)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert torch.equal(keyed_normal((2, 300), **arguments, dtype=dtype), single.to(dtype))


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    seed=st.integers(-(2**63), 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_key_gives_finite_noise_of_that_shape(
    shape: list[int], seed: int, step: int, stream: int
) -> None:
    keys = torch.arange(shape[0]) * 7919 - 5
    both = [
        keyed_normal(shape, seed=seed, row_keys=keys, step=step, stream=stream, backend=backend)
        for backend in BACKENDS
    ]
    assert list(both[0].shape) == shape and bool(both[0].isfinite().all())
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 2**32}, "step is"),
        ({"stream": -2}, "stream is -2"),
        ({"seed": 2**64}, "seed is"),
        ({"row_keys": [1]}, "row_keys has shape"),
        ({"row_keys": "ab"}, "row_keys is one string"),
        ({"row_keys": torch.zeros(2)}, "row_keys has dtype float32"),
        ({"row_keys": [1.2, 1.7]}, "a row key is 1.2; allowed: an integer"),
        (
            {"row_keys": [0, 2**64]},
            "a row key is 18446744073709551616; allowed: an integer of at most 64 bits",
        ),
        ({"row_keys": [0, -(2**63) - 1]}, "a row key is -9223372036854775809; allowed"),
        ({"row_keys": 5}, "row_keys is 5; give a list"),
        ({"shape": (2, 3.7)}, "a value of shape is 3.7; allowed: an integer"),
        ({"shape": 2}, "shape is 2; expected a list of integers"),
        ({"shape": (2, -1)}, "no negative size"),
        ({"dtype": torch.int32}, "dtype is torch.int32; allowed: torch.float32"),
        ({"dtype": torch.float8_e4m3fn}, "dtype is torch.float8_e4m3fn"),
        ({"backend": "triton"}, "backend is 'triton'"),
    ],
)
def test_bad_arguments_are_named(change: dict, message: str) -> None:
    arguments = {"shape": (2, 4), "seed": 0, "row_keys": [1, 2], "step": 0} | change
    with pytest.raises(ValueError, match=message):
        keyed_normal(**arguments)
    with pytest.raises(ValueError, match="row_id is 5; allowed: a string"):
        row_key(5)  # type: ignore[arg-type]
