# SPDX-License-Identifier: Apache-2.0
"""The memory layout of the attention's operands ``[rows, heads, tokens, D]`` and of its results.

A result lies as the tensor whose shape it has, where the values of a head are adjacent there, and is contiguous
otherwise: the same for every kernel, so that a traced graph may rely on it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_adjacent(tensor: Tensor) -> bool:
    """Whether the values of a head are neighbours in memory, as in every usual layout."""
    return tensor.stride(3) == 1 or tensor.shape[3] == 1


def adjacent(tensor: Tensor) -> Tensor:
    """The tensor itself where the values of a head are adjacent, else a copy."""
    return tensor if is_adjacent(tensor) else tensor.contiguous()


def headed(tensor: Tensor) -> tuple[int, int, int, int]:
    """(address, row stride, head stride, token stride), strides in elements: what the extension takes."""
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)


def empty_like(tensor: Tensor) -> Tensor:
    """An uninitialised result in the layout that belongs to ``tensor``."""
    empty = torch.empty_like(tensor)
    return empty if is_adjacent(empty) else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def laid_out_like(result: Tensor, tensor: Tensor) -> Tensor:
    """``result`` itself, or a copy, in the layout and the dtype that belong to ``tensor``."""
    target = empty_like(tensor)
    same = result.stride() == target.stride() and result.dtype is target.dtype
    return result if same else target.copy_(result)
