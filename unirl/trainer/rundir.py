# SPDX-License-Identifier: Apache-2.0
"""The run directory: what a run leaves behind, and where."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from unirl.config import RunConfig, changed_keys, to_plain

MAY_CHANGE_ON_RESUME = frozenset(
    (
        "run_dir",
        "num_rollouts",
        "eval_interval",
        "save_interval",
        "resume",
        "dry_run",
        "ray_address",
        "num_nodes",
    )
)
"""Keys that a resumed run may change (those under `logging` too): none of them changes what is computed."""


class RunDir:
    """`run_dir` and the files in it. Creating the object touches nothing; `create` and `reopen` do."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.timelines = self.path / "timeline"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"

    def check_new(self) -> None:
        """Raises `ValueError` when a run already lives here."""
        if self.metrics_file.exists() or self.config_file.exists():
            raise ValueError(
                f"run_dir {str(self.path)!r} already holds a run; set run_dir to a new folder, or resume: auto to go on with it"
            )

    def create(self, config: RunConfig, plan: str) -> None:
        """Makes the folder with the resolved config, the plan and what it runs on."""
        self.samples.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(yaml.safe_dump(to_plain(config), sort_keys=False))
        (self.path / "plan.txt").write_text(plan + "\n")
        (self.path / "environment.json").write_text(json.dumps(environment(), indent=2) + "\n")

    def check_recipe(self, config: RunConfig) -> None:
        """Raises `ValueError` when a resumed run's recipe differs in a key that changes what is computed."""
        if not self.config_file.exists():
            raise ValueError(
                f"resume: {str(self.path)!r} holds no config.yaml; set run_dir to the folder of the run to go on with"
            )
        old = yaml.safe_load(self.config_file.read_text())
        changed = changed_keys(old, to_plain(config))
        refused = {
            k: v for k, v in changed.items() if k not in MAY_CHANGE_ON_RESUME and not k.startswith("logging.")
        }
        if refused:
            lines = "".join(f"\n  {key}: saved {was!r}, now {now!r}" for key, (was, now) in refused.items())
            raise ValueError(
                f"resume: the recipe differs from the saved one in keys that change what is computed:{lines}\n"
                f"set them back; these may change: {', '.join(sorted(MAY_CHANGE_ON_RESUME))}, logging.*"
            )


def environment() -> dict[str, Any]:
    """Versions and hardware, for the report. No host names, no variables."""
    packages = ("unirl-native", "torch", "ray", "peft", "diffusers", "transformers", "numpy")
    versions = {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpus": gpus,
        "packages": versions,
    }
