# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803 (compile-time constants of a kernel are written in capitals)
"""Triton kernels of :mod:`unirl.models.bagel.fused`. A row's bits depend on the row alone: one program has all of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl.ops.triton import on_device_of_first

SILU_BLOCK = 2048


@triton.jit
def _norm_kernel(hidden, weight, grad_out, out, width, eps, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """A program has a row; ``out`` is the normed row, or the gradient of ``hidden``."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(hidden + row + column, mask=inside, other=0.0)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    if BACKWARD:
        upstream = tl.load(grad_out + row + column, mask=inside, other=0.0).to(tl.float32) * scale
        mean = tl.sum(upstream * wide, axis=0) / width
        result = inverse * (upstream - wide * (inverse * inverse * mean))
    else:
        # Rounded before the weight, as the plain formula is.
        result = (wide * inverse).to(value.dtype).to(tl.float32) * scale
    tl.store(out + row + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expert_load(und, gen, und_offset, gen_offset, is_und, is_gen):
    """Float32, of the expert whose mask is set; 0 where none is."""
    of_und = tl.load(und + und_offset, mask=is_und, other=0.0).to(tl.float32)
    return of_und + tl.load(gen + gen_offset, mask=is_gen, other=0.0).to(tl.float32)


@triton.jit
def _heads_kernel(
    und, gen, und_weight, gen_weight, cos, sin, grad_out, out, grad_und, grad_gen, tokens, und_tokens,
    cos_row_stride, cos_token_stride, grad_row_stride, grad_token_stride, grad_head_stride, eps,
    num_heads: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Head norm and rotation, the tokens of both experts put in their order; a program has one token.

    ``SIZE`` is the head size, ``HEADS`` the next power of two of ``num_heads``.
    """
    program = tl.program_id(0).to(tl.int64)
    row, token = program // tokens, program % tokens
    und_token = tl.minimum(token, und_tokens - 1)
    gen_tokens = tokens - und_tokens
    width = num_heads * SIZE
    head, place = tl.arange(0, HEADS)[:, None], tl.arange(0, SIZE)[None, :]
    other = (place + SIZE // 2) % SIZE  # what the rotation pairs a place with
    here, there = head * SIZE + place, head * SIZE + other
    mask = (head < num_heads) & (place < SIZE)
    at, place_of, other_of = here * 0 + token, here * 0 + place, here * 0 + other
    is_gen = mask & (at > 0) & (at < tokens - 1) & (at * 0 + und_tokens < tokens)
    is_und = mask & (is_gen == 0)
    und_base = (row * und_tokens + und_token) * width
    gen_base = (row * gen_tokens + token - 1) * width
    value = _expert_load(und, gen, und_base + here, gen_base + here, is_und, is_gen)
    scale = _expert_load(und_weight, gen_weight, place_of, place_of, is_und, is_gen)
    inverse = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] / SIZE + eps)
    angle = row * cos_row_stride + token * cos_token_stride
    cosine = tl.load(cos + angle + place)
    if BACKWARD:
        source = grad_out + row * grad_row_stride + token * grad_token_stride + head * grad_head_stride
        upstream = tl.load(source + place, mask=mask, other=0.0).to(tl.float32) * cosine
        paired = tl.load(source + other, mask=mask, other=0.0).to(tl.float32)
        upstream = (upstream + paired * tl.load(sin + angle + other)) * scale
        mean = tl.sum(upstream * value, axis=1)[:, None] / SIZE
        result = inverse * (upstream - value * (inverse * inverse * mean))
        result = result.to(grad_und.dtype.element_ty)
        tl.store(grad_und + und_base + here, result, mask=is_und)
        tl.store(grad_gen + gen_base + here, result, mask=is_gen)
    else:
        paired = _expert_load(und, gen, und_base + there, gen_base + there, is_und, is_gen)
        paired_scale = _expert_load(und_weight, gen_weight, other_of, other_of, is_und, is_gen)
        result = value * inverse * scale * cosine
        result += paired * inverse * paired_scale * tl.load(sin + angle + place)
        tl.store(out + program * width + here, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_kernel(gate, up, grad_out, out, grad_up, size, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """``silu(gate) * up``, or the gradients of ``gate`` (to ``out``) and ``up``."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    stored = tl.load(gate + offset, mask=inside, other=0.0)
    value = stored.to(tl.float32)
    factor = tl.load(up + offset, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-value))
    # Rounded in between, as the plain formula is.
    activated = (value * share).to(stored.dtype).to(tl.float32)
    if BACKWARD:
        upstream = tl.load(grad_out + offset, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_up + offset, (upstream * activated).to(out.dtype.element_ty), mask=inside)
        result = upstream * factor * share * (1.0 + value * (1.0 - share))
    else:
        result = activated * factor
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)


def num_warps(block: int) -> int:
    """Of a program with so many elements."""
    return min(max(block // 512, 1), 8)


@on_device_of_first
def rms_norm(
    hidden: Tensor, weight: Tensor, eps: float, grad_out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The norm of contiguous ``[..., width]``, or with ``grad_out`` the gradient of ``hidden``."""
    out, width = torch.empty_like(hidden), hidden.shape[-1]
    if out.numel():
        block = triton.next_power_of_2(width)
        _norm_kernel[(hidden.numel() // width,)](
            hidden, weight, hidden if grad_out is None else grad_out, out, width, eps,
            BACKWARD=grad_out is not None, BLOCK=block, num_warps=num_warps(block),
        )  # fmt: skip
    return (out,)


@on_device_of_first
def rotated_heads(
    und: Tensor,
    gen: Tensor | None,
    und_weight: Tensor,
    gen_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    grad_out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """``[B, T, H, D]`` from contiguous ``[B, U, H D]`` and ``[B, V, H D]``, or with ``grad_out`` their gradients.

    ``cos`` and ``sin`` are ``[B or 1, T or 1, 1, D]``, alike in memory; of ``grad_out`` a head's values are adjacent.
    """
    rows, und_tokens, width = und.shape
    tokens, size = und_tokens + (0 if gen is None else gen.shape[1]), cos.shape[-1]
    heads = width // size
    angles = cos.expand(rows, tokens, 1, size)
    if grad_out is None:
        results: tuple[Tensor, ...] = (und.new_empty((rows, tokens, heads, size)),)
        out, grads, strides = results[0], (und, und), (0, 0, 0)
    else:
        results = (torch.empty_like(und), *(() if gen is None else (torch.empty_like(gen),)))
        out, grads, strides = und, (results[0], results[-1]), grad_out.stride()[:3]
    if und.numel():
        block = triton.next_power_of_2(heads)
        _heads_kernel[(rows * tokens,)](
            und, und if gen is None else gen, und_weight, gen_weight, cos, sin,
            und if grad_out is None else grad_out, out, *grads, tokens, und_tokens, angles.stride(0), angles.stride(1),
            *strides, eps, num_heads=heads, BACKWARD=grad_out is not None, HEADS=block,
            SIZE=size, num_warps=num_warps(block * size),
        )  # fmt: skip
    return results


@on_device_of_first
def silu_product(gate: Tensor, up: Tensor, grad_out: Tensor | None = None) -> tuple[Tensor, ...]:
    """``silu(gate) * up`` of contiguous tensors, or with ``grad_out`` the gradients of both."""
    results = tuple(torch.empty_like(gate) for _ in range(1 if grad_out is None else 2))
    if gate.numel():
        _silu_kernel[(triton.cdiv(gate.numel(), SILU_BLOCK),)](
            gate, up, gate if grad_out is None else grad_out, results[0], results[-1], gate.numel(),
            BACKWARD=grad_out is not None, BLOCK=SILU_BLOCK, num_warps=8,
        )  # fmt: skip
    return results
