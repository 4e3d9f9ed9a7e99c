# SPDX-License-Identifier: Apache-2.0
"""The picture of an operator's benchmark: how near each peer comes to the ceiling of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """The newest row of each case and peer, of the day of the newest run on a GPU, or on a CPU when there was none.

    A run may be of some cases alone: each row says its commit.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    candidates = [row for row in rows if "hardware" in row] or rows
    day = max(row["date"] for row in candidates)
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted((row for row in candidates if row["date"] == day), key=lambda row: row.get("at", "")):
        key = (row["op"], row["mode"], row.get("renorm"), row.get("dtype"), _case(row), row["provider"])
        newest[tuple(map(str, key))] = row
    return list(newest.values())


def draw(path: Path, folder: Path) -> Path | None:
    """Draw ``bench_<stem>.png`` from the rows of ``path``; ``None`` without matplotlib or anything to show."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in newest_rows(path) if "of_matmul" in row or "of_copy" in row]
    if not rows:
        return None
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = " ".join(part for part in (row["op"], row.get("renorm"), row["mode"]) if part)
        panels.setdefault(name, []).append(row)
    peers = [len({row["provider"] for row in part}) for part in panels.values()]
    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    height = max(2.0, 0.5 * max(peers) + 1.0)
    figure, axes = plt.subplots(
        lines, columns, figsize=(8 * columns, height * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (name, part) in zip(axes.flat, panels.items(), strict=False):
        _bars(axis, name, part)
    first = rows[0]
    where = first.get("hardware") or f"{first['cpu']}, {first['threads']} threads"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    figure.suptitle(f"{where}, torch {first['torch']}, {first['date']}, {commits}", fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    image = folder / f"bench_{path.stem}.png"
    figure.savefig(image, dpi=90)
    plt.close(figure)
    return image


def _bars(axis: Any, title: str, rows: list[dict[str, Any]]) -> None:
    """A group of bars a peer, one bar a case."""
    limit = "of_matmul" if "of_matmul" in rows[0] else "of_copy"
    peers = list(dict.fromkeys(row["provider"] for row in rows))
    cases = list(dict.fromkeys(_case(row) for row in rows))
    thick = 0.8 / len(cases)
    for index, case in enumerate(cases):
        part = [row for row in rows if _case(row) == case]
        places = [peers.index(row["provider"]) + index * thick for row in part]
        axis.barh(places, [100 * row[limit] for row in part], height=thick, label=case)
    axis.set_yticks([place + 0.4 - thick / 2 for place in range(len(peers))], peers, fontsize=8)
    axis.invert_yaxis()
    axis.axvline(100, color="0.6", linewidth=0.8)
    axis.set_xlabel("% of the matrix product's rate" if limit == "of_matmul" else "% of a copy's bandwidth")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _case(row: dict[str, Any]) -> str:
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
    return f"{shape}, {row['device']}" if row.get("device") == "cpu" and "hardware" in row else shape
