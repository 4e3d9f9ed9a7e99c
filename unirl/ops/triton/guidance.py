# SPDX-License-Identifier: Apache-2.0
"""Guidance and renormalisation on the GPU, forward and backward; formulas in :mod:`unirl.ops.guidance`.

With a factor a token one kernel does all. With a factor a row, a first kernel writes each chunk's sums to
``[N, chunks, 3]`` and a second one adds them in order and applies the factor: no atomics, a row's bits depend on
the row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl.ops import _native
from unirl.ops.triton import on_device_of_first

TILE = 1024
"""Elements of a program."""
SUM_BLOCK = 128
MAX_CHANNELS = 16384
"""Of a token that one program holds."""


@triton.jit
def _inputs(
    cond, text, image, offset, mask, text_scale, image_scale, COMPUTE: tl.constexpr, HAS_TEXT: tl.constexpr,
    HAS_IMAGE: tl.constexpr,
):  # fmt: skip
    """(conditional, after the text guidance, image branch); a scale of 1 leaves its target as it is."""
    c = tl.load(cond + offset, mask=mask, other=0.0).to(COMPUTE)
    after_text = c
    if HAS_TEXT:
        u = tl.load(text + offset, mask=mask, other=0.0).to(COMPUTE)
        after_text = tl.where(text_scale == 1.0, c, u + text_scale * (c - u))
    i = c
    if HAS_IMAGE:
        i = tl.load(image + offset, mask=mask, other=0.0).to(COMPUTE)
    return c, after_text, i


@triton.jit
def _with_image(after_text, i, image_scale, HAS_IMAGE: tl.constexpr):
    guided = after_text
    if HAS_IMAGE:
        guided = tl.where(image_scale == 1.0, after_text, i + image_scale * (after_text - i))
    return guided


@triton.jit
def _factor(plain_square, scaled_square, renorm_min, applies):
    """(factor, |plain|, |scaled| + eps, |scaled|, whether the factor moves)."""
    plain = tl.sqrt(plain_square)
    scaled = tl.sqrt(scaled_square)
    total = scaled + 1e-8
    # Without guidance the factor is 1 and stays there.
    ratio = tl.where(applies, plain / total, 2.0)
    factor = tl.minimum(tl.maximum(ratio, renorm_min), 1.0)
    moves = (ratio >= renorm_min) & (ratio <= 1.0)
    return factor, plain, total, scaled, moves


@triton.jit
def _factor_gradients(grad_factor, plain, total, scaled, moves):
    """What the factor's path adds, per unit of the conditional and of the scaled vector."""
    of_plain = tl.where(moves & (plain > 0.0), grad_factor / total / tl.where(plain > 0.0, plain, 1.0), 0.0)
    of_scaled = tl.where(
        moves & (scaled > 0.0),
        -grad_factor * plain / (total * total) / tl.where(scaled > 0.0, scaled, 1.0),
        0.0,
    )
    return of_plain, of_scaled


@triton.jit
def _branch_gradients(
    upstream, after_text, c, i, factor, of_plain, of_scaled, text_scale, image_scale, TEXT_CHANNEL: tl.constexpr
):  # fmt: skip
    """Gradients of (conditional, text branch, image branch) from the gradient of the result."""
    if not TEXT_CHANNEL:
        guided = tl.where(image_scale == 1.0, after_text, i + image_scale * (after_text - i))
        upstream = factor * upstream + of_scaled * guided
    grad_image = tl.where(image_scale == 1.0, 0.0, (1.0 - image_scale) * upstream)
    upstream = tl.where(image_scale == 1.0, upstream, image_scale * upstream)
    if TEXT_CHANNEL:
        upstream = factor * upstream + of_scaled * after_text
    grad_text = tl.where(text_scale == 1.0, 0.0, (1.0 - text_scale) * upstream)
    upstream = tl.where(text_scale == 1.0, upstream, text_scale * upstream)
    return upstream + of_plain * c, grad_text, grad_image


@triton.jit
def _scales(
    row, text_scales, image_scales, COMPUTE: tl.constexpr, HAS_TEXT: tl.constexpr, HAS_IMAGE: tl.constexpr
):
    """A branch that is not given has scale 1."""
    one = (tl.load(text_scales + row) * 0.0 + 1.0).to(COMPUTE)
    text_scale = one
    image_scale = one
    if HAS_TEXT:
        text_scale = tl.load(text_scales + row).to(COMPUTE)
    if HAS_IMAGE:
        image_scale = tl.load(image_scales + row).to(COMPUTE)
    return text_scale, image_scale


@triton.jit
def _tokens_of(row, lengths, seq, HAS_LENGTHS: tl.constexpr):
    tokens = tl.cast(seq, tl.int64)
    if HAS_LENGTHS:
        tokens = tl.maximum(tl.minimum(tl.load(lengths + row), tokens), 0)
    return tokens


@triton.jit
def _token_kernel(
    cond, text, image, out, grad_out, grad_cond, grad_text, grad_image, text_scales, image_scales, lengths,
    renorm_min, cond_stride, text_stride, image_stride, grad_stride, row_size, seq, channels, blocks,
    TEXT_CHANNEL: tl.constexpr, SCALED: tl.constexpr, BACKWARD: tl.constexpr, HAS_TEXT: tl.constexpr,
    HAS_IMAGE: tl.constexpr, HAS_LENGTHS: tl.constexpr, COMPUTE: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Renorm kinds with a factor a token, and none: a program has ``TOKENS`` tokens of a row."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    text_scale, image_scale = _scales(row, text_scales, image_scales, COMPUTE, HAS_TEXT, HAS_IMAGE)
    token = block * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    stored = (token < seq) & (channel < channels)
    real = (token < _tokens_of(row, lengths, seq, HAS_LENGTHS)) & (channel < channels)
    offset = token * channels + channel
    c, after_text, i = _inputs(
        cond + row * cond_stride, text + row * text_stride, image + row * image_stride, offset, real,
        text_scale, image_scale, COMPUTE, HAS_TEXT, HAS_IMAGE,
    )  # fmt: skip
    guided = _with_image(after_text, i, image_scale, HAS_IMAGE)
    factor = c * 0.0 + 1.0
    of_plain = c * 0.0
    of_scaled = c * 0.0
    target = row * row_size + offset
    if SCALED:
        scaled = after_text if TEXT_CHANNEL else guided
        applies = (text_scale != 1.0) if TEXT_CHANNEL else ((text_scale != 1.0) | (image_scale != 1.0))
        plain_square = tl.sum(c * c, axis=1)[:, None]
        scaled_square = tl.sum(scaled * scaled, axis=1)[:, None]
        factor, plain, total, norm, moves = _factor(
            plain_square, scaled_square, tl.full((), renorm_min, tl.float32).to(COMPUTE), applies
        )
    if BACKWARD:
        upstream = tl.load(grad_out + row * grad_stride + offset, mask=real, other=0.0).to(COMPUTE)
        if SCALED:
            before = upstream
            if TEXT_CHANNEL:
                before = tl.where(image_scale == 1.0, upstream, image_scale * upstream)
            grad_factor = tl.sum(before * scaled, axis=1)[:, None]
            of_plain, of_scaled = _factor_gradients(grad_factor, plain, total, norm, moves)
        of_cond, of_text, of_image = _branch_gradients(
            upstream, after_text, c, i, factor, of_plain, of_scaled, text_scale, image_scale, TEXT_CHANNEL
        )
        tl.store(grad_cond + target, of_cond.to(grad_cond.dtype.element_ty), mask=stored)
        if HAS_TEXT:
            tl.store(grad_text + target, of_text.to(grad_text.dtype.element_ty), mask=stored)
        if HAS_IMAGE:
            tl.store(grad_image + target, of_image.to(grad_image.dtype.element_ty), mask=stored)
    else:
        if SCALED:
            if TEXT_CHANNEL:
                guided = _with_image(after_text * factor, i, image_scale, HAS_IMAGE)
            else:
                guided = guided * factor
        tl.store(out + target, guided.to(out.dtype.element_ty), mask=stored)


@triton.jit
def _row_sums_kernel(
    cond, text, image, grad_out, sums, text_scales, image_scales, lengths, cond_stride, text_stride, image_stride,
    grad_stride, seq, channels, blocks, BACKWARD: tl.constexpr, HAS_TEXT: tl.constexpr, HAS_IMAGE: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, COMPUTE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sums of a chunk for ``global``: |conditional|^2, |guided|^2 and, backward, gradient times guided."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    text_scale, image_scale = _scales(row, text_scales, image_scales, COMPUTE, HAS_TEXT, HAS_IMAGE)
    offset = block * TILE + tl.arange(0, TILE)
    real = offset < _tokens_of(row, lengths, seq, HAS_LENGTHS) * channels
    c, after_text, i = _inputs(
        cond + row * cond_stride, text + row * text_stride, image + row * image_stride, offset, real,
        text_scale, image_scale, COMPUTE, HAS_TEXT, HAS_IMAGE,
    )  # fmt: skip
    guided = _with_image(after_text, i, image_scale, HAS_IMAGE)
    tl.store(sums + 3 * program, tl.sum(c * c, axis=0).to(tl.float64))
    tl.store(sums + 3 * program + 1, tl.sum(guided * guided, axis=0).to(tl.float64))
    if BACKWARD:
        upstream = tl.load(grad_out + row * grad_stride + offset, mask=real, other=0.0).to(COMPUTE)
        tl.store(sums + 3 * program + 2, tl.sum(upstream * guided, axis=0).to(tl.float64))


@triton.jit
def _row_apply_kernel(
    cond, text, image, out, grad_out, grad_cond, grad_text, grad_image, sums, text_scales, image_scales, lengths,
    renorm_min, cond_stride, text_stride, image_stride, grad_stride, row_size, seq, channels,
    blocks, BACKWARD: tl.constexpr, HAS_TEXT: tl.constexpr, HAS_IMAGE: tl.constexpr, HAS_LENGTHS: tl.constexpr,
    COMPUTE: tl.constexpr, TILE: tl.constexpr, SUM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Applies the row's factor, or takes its gradient, on one chunk."""
    program = tl.program_id(0).to(tl.int64)
    row, block = program // blocks, program % blocks
    text_scale, image_scale = _scales(row, text_scales, image_scales, COMPUTE, HAS_TEXT, HAS_IMAGE)
    plain_square = tl.load(text_scales + row) * 0.0
    scaled_square = plain_square
    grad_factor = plain_square
    for start in range(0, blocks, SUM_BLOCK):
        index = start + tl.arange(0, SUM_BLOCK)
        place = sums + 3 * (row * blocks + index)
        plain_square += tl.sum(tl.load(place, mask=index < blocks, other=0.0), axis=0)
        scaled_square += tl.sum(tl.load(place + 1, mask=index < blocks, other=0.0), axis=0)
        if BACKWARD:
            grad_factor += tl.sum(tl.load(place + 2, mask=index < blocks, other=0.0), axis=0)
    applies = (text_scale != 1.0) | (image_scale != 1.0)
    factor, plain, total, norm, moves = _factor(
        plain_square.to(COMPUTE),
        scaled_square.to(COMPUTE),
        tl.full((), renorm_min, tl.float32).to(COMPUTE),
        applies,
    )
    offset = block * TILE + tl.arange(0, TILE)
    stored = offset < row_size
    real = offset < _tokens_of(row, lengths, seq, HAS_LENGTHS) * channels
    c, after_text, i = _inputs(
        cond + row * cond_stride, text + row * text_stride, image + row * image_stride, offset, real,
        text_scale, image_scale, COMPUTE, HAS_TEXT, HAS_IMAGE,
    )  # fmt: skip
    target = row * row_size + offset
    if BACKWARD:
        upstream = tl.load(grad_out + row * grad_stride + offset, mask=real, other=0.0).to(COMPUTE)
        of_plain, of_scaled = _factor_gradients(grad_factor.to(COMPUTE), plain, total, norm, moves)
        of_cond, of_text, of_image = _branch_gradients(
            upstream, after_text, c, i, factor, of_plain, of_scaled, text_scale, image_scale, False
        )
        tl.store(grad_cond + target, of_cond.to(grad_cond.dtype.element_ty), mask=stored)
        if HAS_TEXT:
            tl.store(grad_text + target, of_text.to(grad_text.dtype.element_ty), mask=stored)
        if HAS_IMAGE:
            tl.store(grad_image + target, of_image.to(grad_image.dtype.element_ty), mask=stored)
    else:
        guided = _with_image(after_text, i, image_scale, HAS_IMAGE)
        tl.store(
            out + target, tl.where(applies, guided * factor, guided).to(out.dtype.element_ty), mask=stored
        )


def _run(
    grad_out: Tensor | None,
    targets: tuple[Tensor, Tensor, Tensor],
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> None:
    """Launch the forward (``grad_out`` is ``None``; the result goes to ``targets[0]``) or the backward."""
    num_rows, seq, channels = cond.shape
    # A kernel gets the conditional velocity for a branch that is not given, and does not read it.
    operands = [
        _native.contiguous_rows(cond if branch is None else branch)
        for branch in (cond, text_uncond, image_uncond)
    ]
    upstream = operands[0] if grad_out is None else _native.contiguous_rows(grad_out)
    per_row = (text_scale.contiguous(), image_scale.contiguous())
    counts = per_row[0] if lengths is None else lengths.contiguous()
    strides = [operand.stride(0) for operand in (*operands, upstream)]
    options = {
        "BACKWARD": grad_out is not None,
        "HAS_TEXT": text_uncond is not None,
        "HAS_IMAGE": image_uncond is not None,
        "HAS_LENGTHS": lengths is not None,
        "COMPUTE": tl.float64 if cond.dtype is torch.float64 else tl.float32,
        "num_warps": 4,
        "enable_fp_fusion": True,
    }
    if renorm == "global":
        blocks = triton.cdiv(seq * channels, TILE)
        sums = torch.empty((num_rows, blocks, 3), dtype=torch.float64, device=cond.device)
        grid = (num_rows * blocks,)
        _row_sums_kernel[grid](
            *operands, upstream, sums, *per_row, counts, *strides, seq, channels, blocks, TILE=TILE, **options
        )
        _row_apply_kernel[grid](
            *operands, targets[0], upstream, *targets, sums, *per_row, counts, renorm_min, *strides, seq * channels, seq,
            channels, blocks, TILE=TILE, SUM_BLOCK=SUM_BLOCK, **options,
        )  # fmt: skip
        return
    if channels > MAX_CHANNELS:
        raise ValueError(
            f"cond has {channels} channels; allowed with renorm {renorm!r} on a GPU: up to {MAX_CHANNELS}; "
            "backend='reference' takes any number"
        )
    width = triton.next_power_of_2(channels)
    tokens = max(1, TILE // width)
    blocks = triton.cdiv(seq, tokens)
    _token_kernel[(num_rows * blocks,)](
        *operands, targets[0], upstream, *targets, *per_row, counts, renorm_min, *strides, seq * channels, seq, channels,
        blocks,
        TEXT_CHANNEL=renorm == "text_channel", SCALED=renorm is not None, TOKENS=tokens, CHANNELS=width, **options,
    )  # fmt: skip


@on_device_of_first
def guided_velocity(
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> Tensor:
    """Guided velocity; arguments as checked by :func:`unirl.ops.guided_velocity`."""
    out = torch.empty(cond.shape, dtype=cond.dtype, device=cond.device)
    if out.numel():
        inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
        _run(None, (out, out, out), *inputs)
    return out


@on_device_of_first
def guided_velocity_backward(
    grad_out: Tensor,
    cond: Tensor,
    text_uncond: Tensor | None,
    image_uncond: Tensor | None,
    text_scale: Tensor,
    image_scale: Tensor,
    lengths: Tensor | None,
    renorm: str | None,
    renorm_min: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the three branches, empty for ``None``."""
    first, second, third = (
        torch.empty(cond.shape if branch is not None else (0,), dtype=cond.dtype, device=cond.device)
        for branch in (cond, text_uncond, image_uncond)
    )
    if first.numel():
        inputs = (cond, text_uncond, image_uncond, text_scale, image_scale, lengths, renorm, renorm_min)
        _run(grad_out, (first, second, third), *inputs)
    return first, second, third
