# SPDX-License-Identifier: Apache-2.0
"""Many async rollouts with random kills of the rollout worker: nothing grows, and the reward curve is that of a run without kills.

Two runs of one recipe, `deterministic: true`, one of them left alone. While they run, resident memory and open files of all their
processes are sampled. Reported: memory after warm-up and at the end, its slope by least squares, the largest number of open files
in the first and last quarter, actors and processes, and whether the rewards are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from _runs import ROOT, metrics, record, table

from unirl.distributed.failures import STARTED

SMALL = (
    "deterministic=true",
    "batch_size=4",
    "samples_per_prompt=6",
    "sampling.num_inference_steps=6",
    "stack.micro_batch_size=12",
    "reward_stack.micro_batch_size=12",
    "eval_interval=0",
    "logging.console=plain",
    "logging.tensorboard=false",
)
WARM_UP = 0.3
"""Share of the rollouts that is not looked at: allocators and caches fill."""
SAMPLE_S = 0.5


def soak(
    folder: Path, num_rollouts: int, num_kills: int, save_interval: int
) -> tuple[dict[str, list[tuple[float, float, int]]], int]:
    """One run. ({kind of process: (rollouts done, MiB, open files) samples}, kills that hit)."""
    command = [
        sys.executable,
        "-m",
        "unirl.train_async_diffusion",
        "--config-name=diffusion/digits/digits_async",
    ]
    overrides = [
        *SMALL,
        f"run_dir={folder}",
        f"num_rollouts={num_rollouts}",
        f"save_interval={save_interval}",
        f"max_worker_restarts={num_kills}",
    ]
    samples: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    draw = random.Random(500)
    kill_at = sorted(draw.sample(range(2, num_rollouts - 2), num_kills))
    hit = 0
    with (folder.parent / f"{folder.name}.out").open("w") as output:
        process = subprocess.Popen(
            [*command, *overrides],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while process.poll() is None:
            time.sleep(SAMPLE_S)
            done = _lines(folder / "metrics.jsonl")
            workers = {
                _process_of(folder, "train-0"): "train worker",
                _process_of(folder, "rollout-0"): "rollout worker",
            }
            for kind, pid in _family(process.pid, workers):
                with contextlib.suppress(OSError):
                    samples[kind].append((done, _resident_mib(pid), len(os.listdir(f"/proc/{pid}/fd"))))
            if hit < len(kill_at) and done >= kill_at[hit] and (pid := _process_of(folder, "rollout-0")):
                time.sleep(draw.random() * 0.5)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                hit += 1
    if process.returncode:
        raise RuntimeError(f"the run ended with {process.returncode}: see {output.name}")
    return samples, hit


def describe(samples: list[tuple[float, float, int]], num_rollouts: int) -> dict[str, Any]:
    """Memory and files of one kind of process; sums over the processes of a kind are not taken: each sample is one process."""
    warm = [s for s in samples if s[0] >= WARM_UP * num_rollouts]
    steps, mib = np.array([s[0] for s in warm]), np.array([s[1] for s in warm])
    slope = float(np.polyfit(steps, mib, 1)[0]) if len(set(steps)) > 1 else float("nan")
    quarter = max(1, len(warm) // 4)
    return {
        "mib_warm": round(statistics.median(s[1] for s in warm[:quarter]), 1),
        "mib_end": round(statistics.median(s[1] for s in warm[-quarter:]), 1),
        "mib_per_100_rollouts": round(slope * 100, 2),
        "files_warm": max(s[2] for s in warm[:quarter]),
        "files_end": max(s[2] for s in warm[-quarter:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=60, help="500 for the long version")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--save-interval", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        alone, killed = Path(temporary) / "alone", Path(temporary) / "killed"
        soak(alone, arguments.rollouts, 0, arguments.save_interval)
        samples, hit = soak(killed, arguments.rollouts, arguments.kills, arguments.save_interval)
        want, got = metrics(alone), metrics(killed)
    restarts = int(got[arguments.rollouts - 1].get("workers/restarts", 0))
    equal = [want[s]["reward"] == got[s]["reward"] for s in range(arguments.rollouts)]
    common = {
        "rollouts": arguments.rollouts,
        "kills": hit,
        "restarts": restarts,
        "rewards_equal": sum(equal),
        "reward_first": got[0]["reward"],
        "reward_last": got[arguments.rollouts - 1]["reward"],
    }
    rows = [
        {**common, "process": kind, **describe(found, arguments.rollouts)}
        for kind, found in sorted(samples.items())
    ]
    keys = ["process", "mib_warm", "mib_end", "mib_per_100_rollouts", "files_warm", "files_end"]
    print(table(keys, [[str(row[key]) for key in keys] for row in rows]))
    print(f"{common}; written to {record('soak', rows)}")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _process_of(folder: Path, worker: str) -> int | None:
    """The number of a worker's newest process, from its log."""
    log = folder / "logs" / f"{worker}.log"
    if not log.exists():
        return None
    found = [int(m.group(1)) for line in log.read_text().splitlines() if (m := STARTED.search(line))]
    return found[-1] if found else None


def _family(driver: int, workers: dict[int | None, str]) -> list[tuple[str, int]]:
    """(kind, pid) of the driver, of Ray's own processes below it, and of the workers."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                pid = int(entry.name)
                parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                titles[pid] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    found = [("driver", driver)]
    for pid in parents:
        above, steps = pid, 0
        while above in parents and above != driver and steps < 10:
            above, steps = parents[above], steps + 1
        if above == driver and pid != driver:
            title = titles[pid].split("/")[-1]
            if pid in workers:
                found.append((workers[pid], pid))
            elif title in ("raylet", "gcs_server"):
                found.append((title, pid))
    return found


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
