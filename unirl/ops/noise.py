# SPDX-License-Identifier: Apache-2.0
"""Keyed normal noise: a pure function of (seed, stream, row key, step, element index).

Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC
2011). The 64-bit key is ``mix64(mix64(seed) ^ row_key)`` with the SplitMix64 finaliser as ``mix64``; the
counter is ``(block low, block high, step, stream)``, and block ``b`` of a row gives its elements ``4 b .. 4
b + 3``. Two words make two normals (Box and Muller, 1958), evaluated in float32 by the exact sequence of
operations below, so that every backend on a CPU gives the same bits. The largest possible |z| is 6.76.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from unirl.ops import _arguments as arguments
from unirl.ops import _backends
from unirl.ops._reduction import rounded_sqrt

INITIAL_NOISE_STREAM = 0
"""Stream of x_T, the default of :func:`keyed_normal`."""
STEP_NOISE_STREAM = 1
"""Stream of the noise inside a step, the default of :func:`unirl.ops.flow_step`."""

_LOW_32 = 0xFFFFFFFF
_SIGN_64 = 1 << 63
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _as_signed(value: int) -> int:
    """Return ``value`` modulo 2^64 as the signed integer of the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value & _SIGN_64 else value


def row_key(row_id: str) -> int:
    """Return the 64-bit key (signed) of a row id: BLAKE2b of its UTF-8 bytes, 8 bytes, little endian."""
    if not isinstance(row_id, str):
        raise ValueError(f"row_id is {row_id!r}; allowed: a string (an integer is a key already)")
    digest = hashlib.blake2b(row_id.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def row_keys_tensor(row_keys: Tensor | Sequence[str | int], num_rows: int, device: torch.device) -> Tensor:
    """Return the keys of ``num_rows`` rows as int64 ``[N]`` on ``device``; strings go through
    :func:`row_key`.
    """
    if isinstance(row_keys, Tensor):
        arguments.check_dtype("row_keys", row_keys, (torch.int64,))
        keys = row_keys
    else:
        if isinstance(row_keys, str):
            raise ValueError("row_keys is one string; give a list with one id or key a row")
        if not isinstance(row_keys, Iterable):
            raise ValueError(f"row_keys is {row_keys!r}; give a list with one id or key a row")
        keys = torch.tensor(
            [
                row_key(key)
                if isinstance(key, str)
                else _check_64_bits("a row key", arguments.check_integer("a row key", key))
                for key in row_keys
            ],
            dtype=torch.int64,
        )
    arguments.check_shape("row_keys", keys, (num_rows,), "[N], one key a row")
    return keys.to(device)


def check_counter(name: str, value: int) -> int:
    """Return ``value`` if it fits the 32-bit counter word it is used as; else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LOW_32:
        raise ValueError(f"{name} is {value!r}; allowed: an integer from 0 to 2^32 - 1")
    return value


def check_seed(seed: int) -> int:
    """Return ``seed`` as a signed 64-bit integer; any integer of at most 64 bits is allowed."""
    return _check_64_bits("seed", seed)


def _check_64_bits(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -_SIGN_64 <= value < 2 * _SIGN_64:
        raise ValueError(f"{name} is {value!r}; allowed: an integer of at most 64 bits")
    return _as_signed(value)


def keyed_normal(
    shape: Sequence[int],
    *,
    seed: int,
    row_keys: Tensor | Sequence[str | int],
    step: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    stream: int = INITIAL_NOISE_STREAM,
    backend: str | None = None,
) -> Tensor:
    """Standard normal noise ``shape`` = ``[N, ...]`` whose row ``i`` depends on ``row_keys[i]`` and not on
    ``i``.

    A row's bits never depend on the batch, its place in it, the row's length or the number of threads: a
    longer row begins with the shorter one.

    Args:
        shape: ``[N, ...]``; at least one axis.
        seed: any integer of at most 64 bits.
        row_keys: int64 tensor ``[N]``, or a list of row ids (strings, hashed by :func:`row_key`) or integers
            of at most 64 bits.
        step: index of the step, 0 to 2^32 - 1.
        dtype: float32, float64, bfloat16 or float16; the values are float32 and then rounded to it.
        device: where the result lies; by default where ``row_keys`` lies, or the CPU.
        stream: separates uses of one (seed, row, step): 0 is x_T, 1 the noise inside steps, others are free.
        backend: ``None`` (picked by device), ``"native"``, ``"triton"`` or ``"reference"``.

    Raises:
        ValueError: a shape without axes, a wrong number of keys, a key, step, stream or seed out of range.
    """
    shape = tuple(arguments.integers("shape", shape))
    if not shape or min(shape) < 0:
        raise ValueError(f"shape is {shape}; expected [N, ...] with at least one axis and no negative size")
    arguments.check_choice("dtype", dtype, arguments.FLOAT_DTYPES)
    if device is None:
        device = row_keys.device if isinstance(row_keys, Tensor) else torch.device("cpu")
    keys = row_keys_tensor(row_keys, shape[0], torch.device(device))
    check_counter("step", step)
    check_counter("stream", stream)
    key_words = (check_seed(seed), keys, step, stream, dtype)
    if _backends.pick("keyed_normal", keys.device, backend) == _backends.REFERENCE:
        return keyed_normal_reference(keys, shape, check_seed(seed), step, stream).to(dtype)
    return torch.ops.unirl.keyed_normal(shape, *key_words)


def keyed_normal_reference(keys: Tensor, shape: Sequence[int], seed: int, step: int, stream: int) -> Tensor:
    """The plain PyTorch evaluation: float32 noise of ``shape`` on the device of ``keys`` ``[N]``."""
    num_rows, row_size = shape[0], math.prod(shape[1:])
    num_blocks = (row_size + 3) // 4
    block = torch.arange(num_blocks, dtype=torch.int64, device=keys.device).expand(num_rows, num_blocks)
    seed_mix = _mix64(torch.tensor(seed, dtype=torch.int64, device=keys.device))
    key = _mix64(seed_mix ^ keys).unsqueeze(1)
    counter = (
        block & _LOW_32,
        _shift_right(block, 32),
        torch.full_like(block, step),
        torch.full_like(block, stream),
    )
    words = _philox(counter, (key & _LOW_32, _shift_right(key, 32)))
    normals = _box_muller(words[0], words[1]) + _box_muller(words[2], words[3])
    flat = torch.stack(normals, dim=-1).reshape(num_rows, 4 * num_blocks)[:, :row_size]
    return flat.reshape(tuple(shape))


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical right shift of int64 words."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _mix64(value: Tensor) -> Tensor:
    """The SplitMix64 finaliser on int64 words."""
    value = (value ^ _shift_right(value, 30)) * _as_signed(_MIX_1)
    value = (value ^ _shift_right(value, 27)) * _as_signed(_MIX_2)
    return value ^ _shift_right(value, 31)


def _philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32 on 32-bit words held in int64 tensors; products wrap, and the high half is read by a
    shift.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0 = c0 * _PHILOX_MULTIPLIERS[0]
        product1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _shift_right(product1, 32) ^ c1 ^ k0,
            product1 & _LOW_32,
            _shift_right(product0, 32) ^ c3 ^ k1,
            product0 & _LOW_32,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & _LOW_32
        k1 = (k1 + _PHILOX_WEYL[1]) & _LOW_32
    return c0, c1, c2, c3


def _box_muller(radius_word: Tensor, angle_word: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 normals from two 32-bit words: sqrt(-2 ln u) times the sine and cosine of a uniform
    angle.
    """
    radius = rounded_sqrt(-2.0 * _log_of_uniform(radius_word))
    quadrant = angle_word >> 30
    # The low 30 bits, centred, are an angle in (-pi/4, pi/4); the top two choose the quadrant.
    centred = ((angle_word & 0x3FFFFFFF) - (1 << 29)).to(torch.float32)
    angle = (centred + 0.5) * (math.pi / 2 / (1 << 30))
    square = angle * angle
    sine = _polynomial(square, (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)) * angle
    cosine = _polynomial(square, (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800))
    odd = (quadrant & 1).bool()
    first = torch.where(odd, sine, cosine)
    second = torch.where(odd, cosine, sine)
    # cos: + - - +, sin: + + - - over the quadrants 0 1 2 3.
    first = torch.where((quadrant == 1) | (quadrant == 2), -first, first)
    second = torch.where(quadrant >= 2, -second, second)
    return radius * first, radius * second


def _log_of_uniform(word: Tensor) -> Tensor:
    """ln((word + 1/2) / 2^32) in float32, by exponent and mantissa and an atanh series."""
    uniform = (word.to(torch.float32) + 0.5) * (1.0 / (1 << 32))
    bits = uniform.view(torch.int32)
    # Mantissa in [2/3, 4/3): its atanh argument is at most 1/5, where five terms are exact to float32.
    exponent = (bits - 0x3F2AAAAB) >> 23
    mantissa = (bits - (exponent << 23)).view(torch.float32)
    # Above 2/3 the series starts from the distance to 1, which keeps its digits where the uniform rounds to 1.
    distance = ((_LOW_32 - word).to(torch.float32) + 0.5) * (1.0 / (1 << 32))
    near_one = exponent == 0
    ratio = torch.where(near_one, -distance, mantissa - 1.0) / torch.where(
        near_one, 2.0 - distance, mantissa + 1.0
    )
    square = ratio * ratio
    series = _polynomial(square, (2.0, 2 / 3, 2 / 5, 2 / 7, 2 / 9, 2 / 11)) * ratio
    return exponent.to(torch.float32) * math.log(2.0) + series


def _polynomial(variable: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner's rule, one rounded multiplication and one rounded addition a term."""
    value = torch.full_like(variable, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * variable + coefficient
    return value
