# SPDX-License-Identifier: Apache-2.0
"""Reinforcement-learning post-training of diffusion and unified multimodal models."""

from __future__ import annotations

__version__ = "0.1.0"
