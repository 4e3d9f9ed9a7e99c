# SPDX-License-Identifier: Apache-2.0
"""Small recipes on a digits model of random weights: every part is real, only the sizes are small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unirl.config import RunConfig, parse


def recipe(base: Path, run_dir: Path, **changes: Any) -> RunConfig:
    """2 prompts x 4 siblings, 4 steps of which 2 are trained; `a__b=c` sets a nested key."""
    plain: dict[str, Any] = {
        "run_dir": str(run_dir),
        "num_rollouts": 3,
        "batch_size": 2,
        "samples_per_prompt": 4,
        "deterministic": True,
        "model": {"path": str(base), "lora": {"rank": 4, "alpha": 4}},
        "sampling": {
            "num_inference_steps": 4,
            "sde": {"kind": "random", "fraction": [0, 0.5], "num_sde_steps": 2},
        },
        "algorithm": {"clip_range": 0.005},
        "optim": {"lr": 0.01},
        "stack": {"micro_batch_size": 4, "num_updates_per_batch": 2},
        "reward_stack": {"micro_batch_size": 4},
        "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
        "data": {"train": {"name": "digits"}, "eval": {"seen": {"name": "digits_heldout"}}},
        "eval": {"samples_per_prompt": 2, "num_prompts": 3},
        "logging": {"console": "plain", "tensorboard": False},
    }
    for key, value in changes.items():
        *path, last = key.split("__")
        section = plain
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return parse(RunConfig, plain)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
