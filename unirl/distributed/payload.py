# SPDX-License-Identifier: Apache-2.0
"""Trajectories as Ray moves them: numpy arrays, which its object store maps into a reader's memory without a copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from unirl.types import LatentSegment

SegmentPayload = dict[str, tuple[str, np.ndarray]]


def pack_segment(segment: LatentSegment) -> SegmentPayload:
    """Every tensor as (dtype name, array); bfloat16, which numpy lacks, travels as its bits."""
    packed = {}
    for name, tensor in segment.tensors().items():
        column = tensor.detach().cpu().contiguous()
        bits = column.view(torch.int16) if column.dtype == torch.bfloat16 else column
        packed[name] = (str(column.dtype).removeprefix("torch."), bits.numpy())
    return packed


def unpack_segment(payload: SegmentPayload) -> LatentSegment:
    """The inverse, over the payload's own memory, which may be read-only: rows are selected from it, never written."""
    columns = {}
    for name, (dtype, array) in payload.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of read-only memory
            tensor = torch.from_numpy(array)
        columns[name] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    return LatentSegment.from_tensors(columns)
