# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: folders of safetensors and JSON that are complete or are not there.

`<root>/step_000010/` is written as a hidden sibling, every file fsynced, and renamed when it is whole; then
the pointer file `<root>/latest.json` is replaced in the same way. `manifest.json` lists every file with its
size and digest. Nothing is pickled, and loading runs no code.

What is in a checkpoint: `sections`, each a mapping of tensors in a file (or several shards) of its own, and
`state`, one JSON document.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unirl.progress import reached
from unirl.train.tensor_files import (
    DEFAULT_SHARD_BYTES,
    WrittenFile,
    file_digest,
    read_tensors,
    sync_folder,
    write_bytes,
    write_sharded,
)

FORMAT = 1
POINTER_FILE = "latest.json"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
_PREFIX = "step_"


class CheckpointDamaged(ValueError):  # noqa: N818 (a state of affairs, not a kind of error)
    """A checkpoint is partial or altered. `path` is its folder, `fallback` the newest whole one before it, if
    there is one.
    """

    def __init__(self, path: Path, problem: str, fallback: Path | None) -> None:
        offer = (
            f"the one before it is whole: resume from {fallback}"
            if fallback
            else "there is no whole one before it"
        )
        super().__init__(f"checkpoint {path} cannot be used: {problem}; {offer}")
        self.path, self.problem, self.fallback = path, problem, fallback

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.problem, self.fallback)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read: `sections[section][name]` tensors on the CPU, and the JSON `state`."""

    number: int
    sections: dict[str, dict[str, torch.Tensor]]
    state: Any


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A line of a list of checkpoints. `problem` is None for a whole one; `score` is what `save_checkpoint`
    was given.
    """

    path: Path
    number: int
    size_bytes: int
    score: float | None
    problem: str | None


def save_checkpoint(
    root: str | os.PathLike[str],
    number: int,
    sections: Mapping[str, Mapping[str, torch.Tensor]],
    state: Any,
    *,
    keep_last: int = 3,
    score: float | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Writes checkpoint `number`, then removes all but the newest `keep_last` and the one of the highest
    `score`.

    Args:
        sections: written one tensor at a time.
        state: anything that JSON holds exactly: no NaN or infinity, only text keys.
        score: an evaluation's, the higher the better; None when there is none.

    Raises:
        ValueError: `state` is no JSON, or an argument is out of range.
        OSError: the disk is full, read-only or gone. What was there before is untouched, and what was
        half-written is removed.
    """
    if number < 0 or keep_last < 1:
        raise ValueError(
            f"save_checkpoint: number is {number} (allowed: 0 or more), keep_last {keep_last} (allowed: 1 or more)"
        )
    root = Path(root)
    final = root / f"{_PREFIX}{number:06d}"
    partial = root / f".{final.name}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        partial.mkdir()
        _fill(partial, number, sections, state, score, max_shard_bytes)
        _publish(partial, final)
        reached("checkpoint.renamed")
    except BaseException:
        _remove(partial, quietly=True)
        raise
    _point_to(root, final.name)
    _prune(root, keep_last)
    return final


def set_score(path: str | os.PathLike[str], score: float) -> None:
    """Notes an evaluation's score with a checkpoint that was written before it was known. Not a finite one: notes none."""
    path = Path(path)
    manifest = _manifest(path)
    manifest["score"] = score if math.isfinite(score) else None
    _replace(path / MANIFEST_FILE, json.dumps(manifest, indent=1))


def set_aside_after(root: str | os.PathLike[str], number: int) -> None:
    """Renames later checkpoints than `number` to `superseded_...`, of a run that goes on from there, and removes what a crash
    left half-written. Nothing that was whole is deleted.
    """
    root = Path(root)
    for path in _folders(root):
        if _number(path) > number:
            aside = path.with_name(f"superseded_{path.name}")
            _remove(aside)
            path.rename(aside)
    if root.is_dir():
        for left in (*root.glob(f".{_PREFIX}*.partial"), *root.glob(f".{_PREFIX}*.old")):
            _remove(left, quietly=True)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Reads a checkpoint after verifying it. Raises `CheckpointDamaged`, which names the one before it."""
    path = Path(path)
    problem = verify(path)
    if problem is not None:
        raise CheckpointDamaged(path, problem, _whole_before(path))
    manifest = _manifest(path)
    sections = {name: read_tensors(path, files) for name, files in manifest["sections"].items()}
    return Checkpoint(int(manifest["number"]), sections, json.loads((path / STATE_FILE).read_text()))


def verify(path: str | os.PathLike[str]) -> str | None:
    """None for a whole checkpoint, else what is wrong with it. Reads every byte."""
    path = Path(path)
    if not path.is_dir():
        return "there is no such folder"
    try:
        manifest = _manifest(path)
        if manifest["format"] != FORMAT:
            return f"its format is {manifest['format']}; this version reads {FORMAT}"
        listed = [WrittenFile(**entry) for entry in manifest["files"]]
        named = {name for files in manifest["sections"].values() for name in files} | {STATE_FILE}
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}, so writing it was not finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST_FILE} cannot be read ({type(error).__name__}: {error})"
    if named != {f.name for f in listed}:
        return f"{MANIFEST_FILE} does not agree with itself about the files"
    for entry in listed:
        try:
            size = (path / entry.name).stat().st_size
            if size != entry.size_bytes:
                return f"{entry.name} has {size} bytes; {entry.size_bytes} were written"
            if file_digest(path / entry.name) != entry.blake2b:
                return f"{entry.name} is not what was written (its digest differs)"
        except FileNotFoundError:
            return f"{entry.name} is missing"
        except OSError as error:
            return f"{entry.name} cannot be read ({error})"
    return None


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """All checkpoints below `root`, oldest first, each verified."""
    infos = []
    for path in _folders(Path(root)):
        size = sum(f.stat().st_size for f in path.iterdir() if f.is_file())
        infos.append(CheckpointInfo(path, _number(path), size, _score(path), verify(path)))
    return infos


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint by the pointer file, or by its number where a crash came between the rename and
    the pointer.

    A folder under its final name was complete when it was renamed, so the newest one counts even if the
    pointer is behind. It is not verified here: `load_checkpoint` does that and says which to take instead.
    """
    root = Path(root)
    folders = _folders(root)
    try:
        named = json.loads((root / POINTER_FILE).read_text())["checkpoint"]
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    known = [f for f in folders if f.name == named]
    newer = [f for f in folders if not known or _number(f) > _number(known[0])]
    candidates = newer or known
    return candidates[-1] if candidates else None


# ---- writing


def _fill(
    folder: Path,
    number: int,
    sections: Mapping[str, Mapping[str, torch.Tensor]],
    state: Any,
    score: float | None,
    max_shard_bytes: int,
) -> None:
    document = json.dumps(state, allow_nan=False, indent=1)
    if json.loads(document) != state:
        raise ValueError(
            "save_checkpoint: state does not come back from JSON as it went in; use lists, text keys, numbers, text, None"
        )
    files: list[WrittenFile] = []
    names: dict[str, list[str]] = {}
    for section, tensors in sections.items():
        reached("checkpoint.section")
        written = write_sharded(folder, section, tensors, max_shard_bytes=max_shard_bytes)
        names[section] = [f.name for f in written]
        files += written
    files.append(write_bytes(folder / STATE_FILE, document.encode()))
    manifest = {
        "format": FORMAT,
        "number": number,
        "score": score if score is not None and math.isfinite(score) else None,
        "sections": names,
        "files": [dataclasses.asdict(f) for f in files],
    }
    write_bytes(folder / MANIFEST_FILE, json.dumps(manifest, indent=1).encode())
    sync_folder(folder)


def _publish(partial: Path, final: Path) -> None:
    """The rename. A folder of that name, from before a crash or from a run that was resumed further back,
    makes way first.
    """
    old = final.parent / f".{final.name}.old"
    _remove(old)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)
    _remove(old)


def _point_to(root: Path, name: str) -> None:
    _replace(root / POINTER_FILE, json.dumps({"checkpoint": name}))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    write_bytes(partial, text.encode())
    os.replace(partial, path)
    sync_folder(path.parent)


def _prune(root: Path, keep_last: int) -> None:
    folders = _folders(root)
    scores = {path: score for path in folders if (score := _score(path)) is not None}
    best = max(scores, key=lambda path: scores[path]) if scores else None
    for path in folders[:-keep_last]:
        if path != best:
            # Renamed first: a folder that is being taken apart must not look like a checkpoint.
            hidden = path.parent / f".{path.name}.old"
            _remove(hidden, quietly=True)
            path.rename(hidden)
            _remove(hidden, quietly=True)


def _remove(path: Path, *, quietly: bool = False) -> None:
    if path.exists():
        shutil.rmtree(path, ignore_errors=quietly)


# ---- reading


def _manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST_FILE).read_text())


def _folders(root: Path) -> Sequence[Path]:
    if not root.is_dir():
        return []
    found = [
        p
        for p in root.iterdir()
        if p.is_dir() and p.name.startswith(_PREFIX) and p.name[len(_PREFIX) :].isdigit()
    ]
    return sorted(found, key=_number)


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def _score(path: Path) -> float | None:
    try:
        return _manifest(path).get("score")
    except (OSError, ValueError, AttributeError):
        return None


def _whole_before(path: Path) -> Path | None:
    if not path.name.startswith(_PREFIX) or not path.name.removeprefix(_PREFIX).isdigit():
        return None
    older = [p for p in _folders(path.parent) if _number(p) < _number(path)]
    return next((p for p in reversed(older) if verify(p) is None), None)
