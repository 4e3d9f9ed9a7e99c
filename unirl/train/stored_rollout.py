# SPDX-License-Identifier: Apache-2.0
"""A rollout on disk with the weights that generated it: what `unirl parity` replays.

It is written as a checkpoint is, so it is complete or it is not there, and nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch

from unirl.train.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from unirl.train.checkpoint_rows import columns_from_tensors, columns_to_tensors
from unirl.train.stack import TrainStack
from unirl.types import Part

_KEEP_ALL = sys.maxsize


@dataclasses.dataclass(frozen=True)
class StoredRollout:
    """Rows and the trained parameters that generated them.

    Attributes:
        path: where they came from.
        rows: with segment and fingerprints, images of the outputs left out.
        weights: push version to (public name to tensor) of the trained parameters.
    """

    path: Path
    rows: Part
    weights: dict[int, dict[str, torch.Tensor]]


def save_rollout(root: str | os.PathLike[str], number: int, rows: Part, stack: TrainStack) -> Path:
    """Writes rollout `number` below `root`, before it is trained on.

    Raises `ValueError` when the weights of a row's version are not kept any more.
    """
    if rows.push_version is None or rows.policy_step is None:
        raise ValueError(
            "save_rollout: the rows do not say which weights generated them (push_version, policy_step)"
        )
    weights: dict[str, torch.Tensor] = {}
    for version, step in sorted(set(zip(rows.push_version.tolist(), rows.policy_step.tolist(), strict=True))):
        if version not in stack.pushed and step == stack.policy_step:
            generating = {name: p.detach() for name, p in stack.parameters.items()}
        else:
            generating = dict(stack.pushed.weights(version))
        weights.update({f"{version}:{name}": tensor for name, tensor in generating.items()})
    tensors, description = columns_to_tensors(rows.replace(media=None), "rows")
    return save_checkpoint(
        root, number, {"rows": tensors, "weights": weights}, {"rows": description}, keep_last=_KEEP_ALL
    )


def find_rollout(run_dir: str | os.PathLike[str], number: int | None = None) -> Path:
    """The folder of a stored rollout, the newest one by default; where none was stored, the newest checkpoint.

    Raises `ValueError` when there is neither, naming the key that makes a run store some.
    """
    root = Path(run_dir) / "parity"
    if number is not None:
        path = root / f"step_{number:06d}"
        if not path.is_dir():
            stored = sorted(int(p.name.removeprefix("step_")) for p in root.glob("step_*"))
            raise ValueError(f"rollout {number} is not stored in {root}; stored: {stored or 'none'}")
        return path
    found = latest_checkpoint(root) or latest_checkpoint(Path(run_dir) / "checkpoints")
    if found is None:
        raise ValueError(
            f"{run_dir} holds no stored rollout and no checkpoint; run the recipe with parity.store_interval: 1"
        )
    return found


def load_rollout(path: str | os.PathLike[str]) -> StoredRollout:
    """A stored rollout, or the groups that a checkpoint holds in its buffer.

    Raises `CheckpointDamaged`, or `ValueError` for a checkpoint whose buffer was empty.
    """
    path = Path(path)
    checkpoint = load_checkpoint(path)
    if "rows" in checkpoint.state:
        rows = columns_from_tensors(checkpoint.state["rows"], checkpoint.sections["rows"])
        return StoredRollout(path, rows, _by_version(checkpoint.sections["weights"]))
    samples = columns_from_tensors(checkpoint.state["buffer"], checkpoint.sections.get("buffer", {}))
    if not samples:
        raise ValueError(
            f"{path} holds no generated rows (a checkpoint has some only when an async run had finished groups waiting); "
            "run the recipe with parity.store_interval: 1"
        )
    rows = Part.concat([sample.frontier for sample in samples])
    return StoredRollout(path, rows, _by_version(checkpoint.sections["pushed"]))


def _by_version(named: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        version, public = name.split(":", 1)
        weights.setdefault(int(version), {})[public] = tensor
    return weights
