# SPDX-License-Identifier: Apache-2.0
"""Does the demo's recipe learn, and not by cheating?

Runs `digits_async` from several seeds and once with shuffled advantages (nothing can be learned from those). Judges are the
reward on evaluation seeds, the same on a phrasing never trained on, a classifier of another kind that is never a reward, and the
mean pairwise distance within a digit, as a share of the real scans'. Bounds that fail end it with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _runs import IMAGES, curve, metrics, record, table, train

JUDGES = {
    "reward": "eval/reward",
    "held-out phrasing": "eval/heldout/reward",
    "second classifier": "eval/digit_judge",
    "held-out, second": "eval/heldout/digit_judge",
    "diversity of real": "eval/diversity_of_real",
}
RISE = {"reward": 0.35, "held-out phrasing": 0.35, "second classifier": 0.3, "held-out, second": 0.3}
LEAST_DIVERSITY = 0.7
MOST_CONTROL_RISE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the runs go (default: a temporary folder)"
    )
    arguments = parser.parse_args()

    runs = {f"seed {seed}": [f"seed={seed}"] for seed in arguments.seeds}
    runs["control, shuffled"] = ["seed=0", "algorithm.shuffle_advantages=true"]
    rows, failures, folders = [], [], {}
    for name, overrides in runs.items():
        run_dir, wall_s = train("digits_async", *overrides, asynchronous=True, folder=arguments.folder)
        folders[name] = run_dir
        steps = metrics(run_dir)
        first, last = steps[min(steps)], steps[max(steps)]
        row = {"run": name, "rollouts": max(steps), "wall_s": round(wall_s, 1)}
        for judge, key in JUDGES.items():
            row[f"{judge} before"], row[f"{judge} after"] = round(first[key], 4), round(last[key], 4)
        rows.append(row)
        failures += judge_run(name, row)
        print(table(["run", *JUDGES], [line(r) for r in rows]), flush=True)
    record("digits_learning", rows)
    plot(folders)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def judge_run(name: str, row: dict[str, float]) -> list[str]:
    """The bounds that a run misses."""
    rises = {judge: row[f"{judge} after"] - row[f"{judge} before"] for judge in RISE}
    if name.startswith("control"):
        return [
            f"{name}: {j} rose by {r:.3f} > {MOST_CONTROL_RISE}"
            for j, r in rises.items()
            if r > MOST_CONTROL_RISE
        ]
    missed = [
        f"{name}: {j} rose by {rises[j]:.3f} < {least}" for j, least in RISE.items() if rises[j] < least
    ]
    if row["diversity of real after"] < LEAST_DIVERSITY:
        missed.append(
            f"{name}: diversity is {row['diversity of real after']:.2f} of the real scans' < {LEAST_DIVERSITY}"
        )
    return missed


def line(row: dict[str, float]) -> list[str]:
    """One line of the table: before -> after."""
    return [str(row["run"]), *(f"{row[f'{j} before']:.3f} -> {row[f'{j} after']:.3f}" for j in JUDGES)]


def plot(folders: dict[str, Path]) -> None:
    """Evaluation curves of all runs."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), sharex=True)
    for axis, judge in zip(axes, ("reward", "second classifier", "diversity of real"), strict=True):
        for name, folder in folders.items():
            style = {"color": "grey", "linestyle": "--"} if name.startswith("control") else {}
            axis.plot(*curve(folder, JUDGES[judge]), marker="o", markersize=3, label=name, **style)
        axis.set_title(f"evaluation: {judge}")
        axis.set_xlabel("rollout")
        axis.grid(alpha=0.3)
    axes[0].legend()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(IMAGES / "digits_learning.png", dpi=110)


if __name__ == "__main__":
    main()
