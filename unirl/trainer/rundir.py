# SPDX-License-Identifier: Apache-2.0
"""The run directory: what a run leaves behind, and where."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import yaml

from unirl.config import RunConfig, changed_keys, read_recipe_file, to_plain
from unirl.distributed.failures import Refusal
from unirl.metrics import lines_before

AUTO = "auto"
LOCK_FILE = ".lock"
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
        "max_worker_restarts",
        "worker_timeout_s",
        "allow_code",
    )
)
"""Keys that a resumed run may change, those under `logging` and `checkpoint` too. They change when things happen, not what."""
_FREE_SECTIONS = ("logging.", "checkpoint.")


class RunDir:
    """`run_dir` and the files in it. Creating the object touches nothing; `claimed` and `create` do."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.samples = self.path / "samples"
        self.timelines = self.path / "timeline"
        self.checkpoints = self.path / "checkpoints"
        self.adapter = self.path / "adapter"
        self.parity = self.path / "parity"
        self.logs = self.path / "logs"

    def check_new(self) -> None:
        """Raises `ValueError` when a run already lives here."""
        if self.metrics_file.exists() or self.config_file.exists():
            raise ValueError(
                f"run_dir {str(self.path)!r} already holds a run; set run_dir to a new folder, or resume: auto to go on with it"
            )

    def check_writable(self) -> None:
        """Raises `Refusal` when the folder cannot be made or written to. Leaves nothing behind."""
        try:
            folder = next(place for place in (self.path, *self.path.absolute().parents) if place.exists())
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> Refusal:
        return Refusal(
            f"run_dir {str(self.path)!r} cannot be written to ({error.strerror}); change run_dir, or its permissions"
        )

    def holds(self, resume: str) -> bool:
        """Whether what is resumed is the run in this folder; else it is another one's checkpoint and the folder has to be new."""
        return resume == AUTO or self.path.resolve() in Path(resume).resolve().parents

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Makes the folder and keeps other runs out of it while the block runs; a folder that stays empty is removed again.

        Raises `Refusal` when another run is at work in it, or it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK_FILE).open("a")
        except OSError as error:
            raise self._unwritable(error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refusal(
                    f"run_dir {str(self.path)!r} is in use by another run that is still at work; change run_dir"
                ) from None
            try:
                yield
            finally:
                with suppress(OSError):
                    if os.listdir(self.path) == [LOCK_FILE]:
                        (self.path / LOCK_FILE).unlink()
                        self.path.rmdir()

    def create(self, config: RunConfig, plan: str, first_rollout: int = 0) -> None:
        """Fills the folder with the resolved config, the plan and what it runs on.

        Of a run that goes on at `first_rollout`, lines of `metrics.jsonl` for that rollout and later ones are dropped: they will
        be written again.
        """
        self.samples.mkdir(parents=True, exist_ok=True)
        replace_text(self.config_file, yaml.safe_dump(to_plain(config), sort_keys=False))
        replace_text(self.path / "plan.txt", plan + "\n")
        replace_text(self.path / "environment.json", json.dumps(environment(), indent=2) + "\n")
        if self.metrics_file.exists():
            replace_text(self.metrics_file, self.metrics_before(first_rollout))

    def metrics_before(self, first_rollout: int) -> str:
        """The lines of `metrics.jsonl` that a run going on at `first_rollout` keeps. Raises `ValueError` with the number of a line
        that cannot be read.
        """
        return lines_before(self.metrics_file, first_rollout) if self.metrics_file.exists() else ""

    def accepted_changes(self, config: RunConfig) -> dict[str, tuple[Any, Any]]:
        """`{key: (saved, now)}` of what a resumed run changes and may. Raises `ValueError` for what it may not.

        With `resume` the path of another run's checkpoint, the recipe to compare with is that run's.
        """
        saved_in = self.config_file
        if config.resume not in (None, AUTO):
            saved_in = Path(str(config.resume)).parent.parent / self.config_file.name
        if not saved_in.exists():
            raise ValueError(
                f"resume: {str(saved_in.parent)!r} holds no config.yaml; set run_dir to the folder of the run to go on with, or "
                "resume to a checkpoint in one"
            )
        changed = changed_keys(read_recipe_file(saved_in), to_plain(config))
        refused = {
            k: v
            for k, v in changed.items()
            if k not in MAY_CHANGE_ON_RESUME and not k.startswith(_FREE_SECTIONS)
        }
        if refused:
            lines = "".join(f"\n  {key}: saved {was!r}, now {now!r}" for key, (was, now) in refused.items())
            raise ValueError(
                f"resume: the recipe differs from the saved one in keys that change what is computed:{lines}\n"
                f"set them back; these may change: {', '.join(sorted(MAY_CHANGE_ON_RESUME))}, logging.*, checkpoint.*"
            )
        return {k: v for k, v in changed.items() if k not in ("resume", "dry_run")}


def replace_text(path: Path, text: str) -> None:
    """Writes a file so that whoever reads it, also after a crash, finds the old or the new text, never half of one."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


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
