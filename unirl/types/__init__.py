# SPDX-License-Identifier: Apache-2.0
"""Row containers: `Sample`, `Part`, `LatentSegment`, `Canvas`, `NoiseRecipe`, `SamplingParams`."""

from unirl.types.canvas import Canvas, check_canvases
from unirl.types.columns import ROW, SHARED, Columns
from unirl.types.latent import UNUSED, LatentSegment, SegmentRef, frames_to_keep
from unirl.types.layout import LayoutRecord, fingerprints_of, to_host
from unirl.types.ragged import RaggedLatents
from unirl.types.sample import Part, Sample
from unirl.types.sampling import STREAM_EVAL, STREAM_TRAIN, NoiseRecipe, SamplingParams, group_of

__all__ = [
    "ROW",
    "SHARED",
    "STREAM_EVAL",
    "STREAM_TRAIN",
    "UNUSED",
    "Canvas",
    "Columns",
    "LatentSegment",
    "LayoutRecord",
    "NoiseRecipe",
    "Part",
    "RaggedLatents",
    "Sample",
    "SamplingParams",
    "SegmentRef",
    "check_canvases",
    "fingerprints_of",
    "frames_to_keep",
    "group_of",
    "to_host",
]
