# SPDX-License-Identifier: Apache-2.0
"""What `unirl checkpoints` shows: every checkpoint of a run, verified byte by byte."""

from __future__ import annotations

from pathlib import Path

from unirl.train.checkpoint import CheckpointInfo, latest_checkpoint, list_checkpoints


def checkpoints_table(run_dir: Path) -> tuple[str, bool]:
    """(a table, whether all checkpoints are whole). Raises `ValueError` when the folder is no run, or holds none."""
    root = run_dir / "checkpoints"
    infos = list_checkpoints(root)
    if not infos:
        what = "holds no checkpoint (save_interval)" if run_dir.is_dir() else "is no folder"
        raise ValueError(f"{run_dir} {what}; name the directory of a run")
    newest = latest_checkpoint(root)
    scored = [info for info in infos if info.score is not None]
    best = max(scored, key=lambda info: info.score or 0.0).path if scored else None
    rows = [("checkpoint", "rollouts", "size", "eval/reward", "")]
    for info in infos:
        marks = [name for name, path in (("newest", newest), ("best", best)) if path == info.path]
        rows.append(_row(info, marks))
    rows.extend(
        (left.name, "", "", "", "half-written: a crash left it; ignored") for left in _leftovers(root)
    )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(lines), all(info.problem is None for info in infos)


def _row(info: CheckpointInfo, marks: list[str]) -> tuple[str, str, str, str, str]:
    score = "" if info.score is None else f"{info.score:.4f}"
    state = "whole" if info.problem is None else f"DAMAGED: {info.problem}"
    return info.path.name, str(info.number), _size(info.size_bytes), score, ", ".join([state, *marks])


def _size(num_bytes: int) -> str:
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _leftovers(root: Path) -> list[Path]:
    return sorted([*root.glob(".step_*.partial"), *root.glob(".step_*.old")])
