# SPDX-License-Identifier: Apache-2.0
"""TensorBoard and wandb sinks, several sinks as one, and the check that the asked ones can be opened at all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.metrics.jsonl import JsonlSink
from unirl.metrics.scalars import to_scalar
from unirl.protocols import MetricsSink

WANDB_ID_FILE = "wandb_run_id"
"""In the run directory: which wandb run a resumed run goes on with."""


class TensorBoardSink:
    """TensorBoard events in `folder`. Numbers as scalars (non-finite ones too: TensorBoard marks them), text
    as text.

    `first_step` (a resumed run) tells TensorBoard to forget what an earlier process logged from that step on.
    """

    def __init__(self, folder: str | os.PathLike[str], *, first_step: int | None = None) -> None:
        _require("tensorboard", "logging.tensorboard", "pip install tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, given in metrics.items():
            value = to_scalar(name, given)
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif value is not None:
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, when `logging.wandb` asks for it.

    Offline or online is wandb's own setting (`WANDB_MODE`).
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        project: str,
        config: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> None:
        _require("wandb", "logging.wandb", 'pip install "unirl-native[wandb]" (or pip install wandb)')
        import wandb

        # A resumed run goes on under its id; a new one, even in a folder used before, never joins an old one.
        known = Path(run_dir) / WANDB_ID_FILE
        run_id = known.read_text().strip() if resume and known.is_file() else None
        self._run = wandb.init(
            project=project,
            name=Path(run_dir).name,
            dir=str(run_dir),
            config=dict(config or {}),
            id=run_id,
            resume="allow" if run_id else None,
        )
        known.write_text(f"{self._run.id}\n")

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({name: to_scalar(name, value) for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._run.finish()


class MultiSink:
    """Writes to every sink, in order.

    One that fails keeps no other from its line; the first error is raised afterwards.
    """

    def __init__(self, sinks: Sequence[MetricsSink]) -> None:
        self.sinks = list(sinks)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._each("write", step, metrics)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *arguments: Any) -> None:
        first: Exception | None = None
        for sink in self.sinks:
            try:
                getattr(sink, method)(*arguments)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first


def check_sinks(*, tensorboard: bool, wandb: bool) -> None:
    """Raises `ValueError` when an asked sink's package is missing. Call it before any worker starts."""
    if tensorboard:
        _require("tensorboard", "logging.tensorboard", "pip install tensorboard")
    if wandb:
        _require("wandb", "logging.wandb", 'pip install "unirl-native[wandb]" (or pip install wandb)')


def open_sinks(
    run_dir: str | os.PathLike[str],
    *,
    tensorboard: bool = True,
    wandb: bool = False,
    wandb_project: str = "unirl",
    config: Mapping[str, Any] | None = None,
    first_step: int = 0,
    extra: Sequence[MetricsSink] = (),
) -> MultiSink:
    """`metrics.jsonl` first, so that it has the line whatever the others do; then the asked ones, then
    `extra` (the console).

    `first_step` above 0 says that a run is resumed there.
    """
    check_sinks(tensorboard=tensorboard, wandb=wandb)
    folder = Path(run_dir)
    sinks: list[MetricsSink] = [JsonlSink(folder / "metrics.jsonl")]
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", first_step=first_step or None))
    if wandb:
        sinks.append(WandbSink(folder, project=wandb_project, config=config, resume=first_step > 0))
    return MultiSink([*sinks, *extra])


def _require(package: str, key: str, command: str) -> None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of that name (wandb leaves one) is no package
        raise ValueError(
            f"{key} is true but the package {package!r} is not installed; {command}, or set {key}: false"
        )
