# SPDX-License-Identifier: Apache-2.0
"""Public operators. They need torch and nothing else of this package: no Ray, no diffusers, no model."""

from __future__ import annotations

from unirl.ops import library as _library  # noqa: F401 - registers torch.ops.unirl
from unirl.ops.attention import available_attention_backends, sibling_prefix_attention
from unirl.ops.digest import layout_digest, tensor_digest
from unirl.ops.flow import flow_log_prob, flow_step
from unirl.ops.guidance import guided_velocity
from unirl.ops.noise import INITIAL_NOISE_STREAM, STEP_NOISE_STREAM, keyed_normal, row_key
from unirl.ops.packing import pad_latents, trim_latents
from unirl.ops.sibling_kv import SiblingKV

__all__ = [
    "INITIAL_NOISE_STREAM",
    "STEP_NOISE_STREAM",
    "SiblingKV",
    "available_attention_backends",
    "flow_log_prob",
    "flow_step",
    "guided_velocity",
    "keyed_normal",
    "layout_digest",
    "pad_latents",
    "row_key",
    "sibling_prefix_attention",
    "tensor_digest",
    "trim_latents",
]
