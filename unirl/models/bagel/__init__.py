# SPDX-License-Identifier: Apache-2.0
"""BAGEL, from the public 7B checkpoint to a digits model that trains on one core."""

from unirl.models.bagel.config import PRESETS, BagelConfig, preset
from unirl.models.bagel.context import ContextRequest, Contexts, SourceImage, build_contexts
from unirl.models.bagel.guidance import Guidance
from unirl.models.bagel.layout import Layout, plan_layout
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.stage import BagelStage
from unirl.models.bagel.weights import check_weights, load_model, load_weights, save_model, save_weights

__all__ = [
    "PRESETS",
    "Bagel",
    "BagelConfig",
    "BagelStage",
    "ContextRequest",
    "Contexts",
    "Guidance",
    "Layout",
    "SourceImage",
    "build_contexts",
    "check_weights",
    "load_model",
    "load_weights",
    "plan_layout",
    "preset",
    "save_model",
    "save_weights",
]
