# SPDX-License-Identifier: Apache-2.0
"""A sum of fixed order, so that a row's bits depend on the row alone.

The elements are cut into blocks of 256. Inside a block, element ``i`` goes to lane ``i % 16``; a lane adds
its 16 elements in order, the 16 lanes are halved four times, and the block sums are added pairwise in
float64. Trailing
zeros change nothing: a padded row gives the bits of the unpadded one. The C++ kernels use the same order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
LANES = 16


def ordered_sum(values: Tensor) -> Tensor:
    """Sum ``values`` ``[..., E]`` over the last axis in the fixed order; returns float64 ``[...]``."""
    num_elements = values.shape[-1]
    num_blocks = 1
    while num_blocks * BLOCK < num_elements:
        num_blocks *= 2
    padded = F.pad(values, (0, num_blocks * BLOCK - num_elements))
    blocks = padded.reshape(*values.shape[:-1], num_blocks, BLOCK // LANES, LANES)
    lanes = blocks[..., 0, :]
    for step in range(1, BLOCK // LANES):
        lanes = lanes + blocks[..., step, :]
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    sums = lanes.squeeze(-1).to(torch.float64)
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    return sums.squeeze(-1)


def rounded_sqrt(values: Tensor) -> Tensor:
    """Square root rounded correctly in float32: torch's own CPU vector code may be off by one bit."""
    return torch.sqrt(values.to(torch.float64)).to(values.dtype)
