# SPDX-License-Identifier: Apache-2.0
"""The in-process engine: the trainer's own model code generates."""

from unirl.rollout.engine.trainside.engine import TrainsideEngine

__all__ = ["TrainsideEngine"]
