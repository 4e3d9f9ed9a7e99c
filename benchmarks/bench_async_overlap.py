# SPDX-License-Identifier: Apache-2.0
"""What overlapping generation with training saves, and what lagging weights cost.

A balanced digits recipe (generation and training take about equally long) on one training and one rollout process, a core each:
sync-separate, then async at staleness 0, 1 and 2, on the same prompts, seeds and number of rollouts. Wall seconds a rollout against
the larger of generate and train, and the evaluation reward at equal rollouts. The first rollouts, which start cold, are not timed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _runs import IMAGES, curve, metrics, record, table, train

BALANCED = (
    "sampling.num_inference_steps=10",
    "sampling.sde.num_sde_steps=4",
    "stack.micro_batch_size=60",
)
WARM_UP = 3
VARIANTS = {
    "sync-separate": ("digits_separate", False, ()),
    "async, staleness 0": ("digits_async", True, ("buffer_max_staleness=0", "weight_sync_interval=10")),
    "async, staleness 1": ("digits_async", True, ("buffer_max_staleness=1",)),
    "async, staleness 2": ("digits_async", True, ("buffer_max_staleness=2", "max_inflight=2")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2, help="each variant this many times, in turn")
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()

    runs: dict[str, list[Path]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name, (recipe, asynchronous, overrides) in VARIANTS.items():
            common = (f"num_rollouts={arguments.rollouts}", "eval_interval=10", *BALANCED)
            run_dir, _ = train(
                recipe, *common, *overrides, asynchronous=asynchronous, folder=arguments.folder
            )
            runs[name].append(run_dir)
    rows = [describe(name, folders) for name, folders in runs.items()]
    base = rows[0]
    for row in rows:
        row["speed-up over sync-separate"] = round(base["wall_s"] / row["wall_s"], 3)
        row["final reward minus sync"] = round(row["reward"] - base["reward"], 4)
    record("async_overlap", rows)
    header = [
        "variant",
        "generate_s",
        "train_s",
        "wall_s",
        "wall / max",
        "speed-up over sync-separate",
        "final reward minus sync",
    ]
    print(table(header, [[str(row[h]) for h in header] for row in rows]))
    plot({name: folders[0] for name, folders in runs.items()})


def describe(name: str, folders: list[Path]) -> dict[str, float | str]:
    """Medians over rollouts of all repeats. Wall leaves evaluations out."""
    seconds: dict[str, list[float]] = {"generate_s": [], "train_s": [], "wall_s": []}
    for folder in folders:
        for step, row in metrics(folder).items():
            if step < WARM_UP or "reward" not in row:
                continue
            seconds["generate_s"].append(row["perf/generate_s"] + row["perf/score_s"])
            seconds["train_s"].append(row["perf/train_s"])
            seconds["wall_s"].append(row["perf/step_s"] - row.get("perf/eval_s", 0.0))
    # A window's cold start is one rollout in many: a mean over the run counts it, a median would not.
    mean = {key: statistics.fmean(values) for key, values in seconds.items()}
    _, rewards = curve(folders[0], "eval/reward")
    return {
        "variant": name,
        **{key: round(value, 3) for key, value in mean.items()},
        "wall / max": round(mean["wall_s"] / max(mean["generate_s"], mean["train_s"]), 3),
        "reward": rewards[-1],
    }


def plot(folders: dict[str, Path]) -> None:
    """Evaluation reward at equal rollouts."""
    figure, axis = plt.subplots(figsize=(6.5, 4))
    for name, folder in folders.items():
        axis.plot(*curve(folder, "eval/reward"), marker="o", markersize=3, label=name)
    axis.set_xlabel("rollout")
    axis.set_ylabel("evaluation reward")
    axis.grid(alpha=0.3)
    axis.legend()
    IMAGES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(IMAGES / "async_overlap.png", dpi=110)


if __name__ == "__main__":
    main()
