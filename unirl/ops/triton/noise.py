# SPDX-License-Identifier: Apache-2.0
"""Keyed normal noise on the GPU; the definition is in :mod:`unirl.ops.noise`.

Every operation is rounded on its own (correctly rounded division and square root, no fused multiply-add: the
launchers pass ``enable_fp_fusion=False``), which gives the bits of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl.ops.triton import on_device_of_first

CHUNK = 1024


@triton.jit
def _mix64(value):
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def noise_key(seed, row_key):
    """The 64-bit Philox key of a row; both arguments are 64-bit integers."""
    return _mix64(_mix64(seed.to(tl.uint64)) ^ row_key.to(tl.uint64))


@triton.jit
def _log_of_uniform(word):
    uniform = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    bits = uniform.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    distance = ((0xFFFFFFFF - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = exponent == 0
    ratio = tl.div_rn(
        tl.where(near_one, -distance, mantissa - 1.0), tl.where(near_one, 2.0 - distance, mantissa + 1.0)
    )
    square = ratio * ratio
    series = square * 0.18181818181818182 + 0.2222222222222222
    series = series * square + 0.2857142857142857
    series = series * square + 0.4
    series = series * square + 0.6666666666666666
    series = series * square + 2.0
    return exponent.to(tl.float32) * 0.6931471805599453 + series * ratio


@triton.jit
def _box_muller(radius_word, angle_word):
    radius = tl.sqrt_rn(-2.0 * _log_of_uniform(radius_word))
    quadrant = angle_word >> 30
    centred = ((angle_word & 0x3FFFFFFF).to(tl.int32) - 536870912).to(tl.float32)
    angle = (centred + 0.5) * 1.4629180792671596e-09
    square = angle * angle
    sine = square * 2.7557319223985893e-06 - 0.0001984126984126984
    sine = sine * square + 0.008333333333333333
    sine = sine * square - 0.16666666666666666
    sine = (sine * square + 1.0) * angle
    cosine = square * -2.755731922398589e-07 + 2.48015873015873e-05
    cosine = cosine * square - 0.001388888888888889
    cosine = cosine * square + 0.041666666666666664
    cosine = cosine * square - 0.5
    cosine = cosine * square + 1.0
    odd = (quadrant & 1) == 1
    first = tl.where(odd, sine, cosine)
    second = tl.where(odd, cosine, sine)
    first = tl.where((quadrant == 1) | (quadrant == 2), -first, first)
    second = tl.where(quadrant >= 2, -second, second)
    return radius * first, radius * second


@triton.jit
def noise_chunk(key, chunk, step, stream, CHUNK: tl.constexpr):
    """Elements ``chunk CHUNK .. (chunk + 1) CHUNK - 1`` of a row, float32 ``[CHUNK]``."""
    block = chunk.to(tl.int64) * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    zero = tl.zeros([CHUNK // 4], dtype=tl.uint32)
    w0, w1, w2, w3 = tl.philox(
        key,
        block.to(tl.uint32),
        (block >> 32).to(tl.uint32),
        zero + step.to(tl.uint32),
        zero + stream.to(tl.uint32),
    )
    z0, z1 = _box_muller(w0, w1)
    z2, z3 = _box_muller(w2, w3)
    return tl.interleave(tl.interleave(z0, z2), tl.interleave(z1, z3))


@triton.jit(do_not_specialize=["seed", "step", "stream"])
def _noise_kernel(out, keys, seed, step, stream, row_size, chunks, CHUNK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    key = noise_key(seed, tl.load(keys + row))
    noise = noise_chunk(key, chunk, step, stream, CHUNK)
    element = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(out + row * row_size + element, noise.to(out.dtype.element_ty), mask=element < row_size)


@on_device_of_first
def keyed_normal(
    row_keys: Tensor, shape: Sequence[int], seed: int, step: int, stream: int, dtype: torch.dtype
) -> Tensor:
    """Noise ``shape`` on the device of ``row_keys``; arguments as checked by :func:`unirl.ops.keyed_normal`."""
    out = torch.empty(tuple(shape), dtype=dtype, device=row_keys.device)
    row_size = math.prod(shape[1:])
    if out.numel() == 0:
        return out
    chunks = triton.cdiv(row_size, CHUNK)
    keys = row_keys.contiguous()
    _noise_kernel[(shape[0] * chunks,)](
        out, keys, seed, step, stream, row_size, chunks, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False
    )
    return out
