# SPDX-License-Identifier: Apache-2.0
"""``torch.ops.unirl.keyed_normal``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.ops import _native
from unirl.ops._backends import REFERENCE, default_backend
from unirl.ops.noise import keyed_normal_reference

torch.library.define(
    "unirl::keyed_normal",
    "(SymInt[] shape, int seed, Tensor row_keys, int step, int stream, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl("unirl::keyed_normal", "cpu")
def _keyed_normal_cpu(
    shape: Sequence[int], seed: int, row_keys: Tensor, step: int, stream: int, dtype: torch.dtype
) -> Tensor:
    if default_backend("keyed_normal", "cpu") == REFERENCE:
        return keyed_normal_reference(row_keys, shape, seed, step, stream).to(dtype)
    out = torch.empty(tuple(shape), dtype=dtype)
    keys = row_keys.contiguous()
    _native.kernels().keyed_normal(
        (out.data_ptr(), _native.DTYPE_CODES[dtype], math.prod(shape[1:])),
        shape[0],
        math.prod(shape[1:]),
        seed,
        keys.data_ptr(),
        step,
        stream,
        _native.num_threads(),
    )
    return out


@torch.library.impl("unirl::keyed_normal", "cuda")
def _keyed_normal_cuda(
    shape: Sequence[int], seed: int, row_keys: Tensor, step: int, stream: int, dtype: torch.dtype
) -> Tensor:
    if default_backend("keyed_normal", "cuda") == REFERENCE:
        return keyed_normal_reference(row_keys, shape, seed, step, stream).to(dtype)
    from unirl.ops.triton.noise import keyed_normal

    return keyed_normal(row_keys, shape, seed, step, stream, dtype)


@torch.library.register_fake("unirl::keyed_normal")
def _keyed_normal_fake(
    shape: Sequence[int], seed: int, row_keys: Tensor, step: int, stream: int, dtype: torch.dtype
) -> Tensor:
    return row_keys.new_empty(tuple(shape), dtype=dtype)
