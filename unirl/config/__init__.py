# SPDX-License-Identifier: Apache-2.0
"""Config dataclasses, parsing with unknown-key errors, and the checks that run before any worker starts."""

from unirl.config.checks import check, warnings
from unirl.config.parse import changed_keys, parse, to_plain
from unirl.config.recipe_file import read_recipe_file
from unirl.config.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    DatasetConfig,
    EmaConfig,
    EvalConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParityConfig,
    RewardConfig,
    RewardStackConfig,
    RunConfig,
    SamplingConfig,
    ScorerConfig,
    StackConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "DataConfig",
    "DatasetConfig",
    "EmaConfig",
    "EvalConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParityConfig",
    "RewardConfig",
    "RewardStackConfig",
    "RunConfig",
    "SamplingConfig",
    "ScorerConfig",
    "StackConfig",
    "changed_keys",
    "check",
    "parse",
    "read_recipe_file",
    "to_plain",
    "warnings",
]
