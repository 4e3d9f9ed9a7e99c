# SPDX-License-Identifier: Apache-2.0
"""Losses over replayed transitions. They know `Replay` and `Part`, never a model."""

from unirl.algorithms.advantages import prepare_advantages
from unirl.algorithms.flow_grpo import FlowGRPO

__all__ = ["FlowGRPO", "prepare_advantages"]
