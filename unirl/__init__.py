# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training of diffusion and unified multimodal models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.accelerate import accelerate as accelerate

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The module itself can be called, so the name means the same whether it was imported before or not.
    if name == "accelerate":
        return importlib.import_module("unirl.accelerate")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
