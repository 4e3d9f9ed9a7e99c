# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path

import pytest

from unirl.config import RunConfig, parse
from unirl.metrics import read_metrics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
DERIVED = re.compile(r"(_max|/update_\d+)$")


def documented() -> list[re.Pattern[str]]:
    """The names in the tables' first columns, with `<placeholders>` matching one part and `...` any rest."""
    patterns = []
    for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            pattern = re.escape(name).replace(r"\.\.\.", ".+")
            patterns.append(re.compile(re.sub(r"<\w+>", r"[^/]+", pattern)))
    return patterns


def test_the_page_lists_names() -> None:
    names = {pattern.pattern for pattern in documented()}
    assert {"reward", "ratio", "gn", "clip"} <= names and len(names) > 40


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(ray_cluster: None, random_base: Path, tmp_path: Path) -> None:
    from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

    recipe = {
        "run_dir": str(tmp_path / "run"),
        "num_rollouts": 3,
        "batch_size": 3,
        "samples_per_prompt": 3,
        "num_devices": 2,
        "layout": "separate",
        "buffer_max_staleness": 1,
        "save_interval": 1,
        "eval_interval": 1,
        "model": {"path": str(random_base), "lora": {"rank": 2, "alpha": 2}},
        "sampling": {"height": 12, "width": 12, "num_inference_steps": 3},
        "algorithm": {"beta": 0.1},
        "stack": {"num_updates_per_batch": 2},
        "reward": {
            "scorers": [{"name": "digit_probability"}, {"name": "jpeg_compressibility", "weight": 0.0}]
        },
        "data": {
            "train": {"name": "digits_mixed"},
            "eval": {"a": {"name": "digits"}, "b": {"name": "digits_heldout"}},
        },
        "eval": {"samples_per_prompt": 2, "num_prompts": 2, "set_metrics": ["digit_diversity"]},
        "logging": {"console": "plain", "tensorboard": False},
    }
    folder = AsyncDiffusionTrainer(parse(RunConfig, recipe)).run()
    logged = {name for row in read_metrics(folder / "metrics.jsonl") for name in row} - {"step", "time"}
    assert {"async/staleness", "kl_ref", "canvas/12x8/reward", "eval/b/diversity"} <= logged
    patterns = documented()
    missing = {
        name
        for name in logged
        if not any(
            pattern.fullmatch(name) or pattern.fullmatch(DERIVED.sub("", name)) for pattern in patterns
        )
    }
    assert not missing, f"not in docs/metrics.md: {sorted(missing)}"
