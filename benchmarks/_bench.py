# SPDX-License-Identifier: Apache-2.0
"""What the GPU benchmarks share: fair timing of peers in one process, ceilings of the same run, rows of results.

A GPU under load lowers its clock, so whoever runs after a hot neighbour looks slow. Every round therefore runs the
peers in a new random order, in bursts with a pause before each, and medians are taken over the rounds.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


class Timing(NamedTuple):
    """Milliseconds of one call: the median over the rounds, and the 20th and 80th percentiles."""

    ms: float
    ms_p20: float
    ms_p80: float


def environment() -> dict[str, Any]:
    """Hardware, date, commit and versions: what a row of results is worth nothing without."""
    root = Path(__file__).parents[1]
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": _git(root, "rev-parse", "--short", "HEAD"),
    }
    if _git(root, "status", "--porcelain", "--", "unirl", "csrc", "benchmarks"):
        found["commit"] += "+changes"
    found["torch"] = torch.__version__
    for package in ("triton", "fa3-fwd"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["hardware"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def interleaved(
    providers: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 15,
    burst_ms: float = 10.0,
    pause_s: float = 0.03,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time each provider in bursts of about ``burst_ms``, in a new order each round, with device events."""
    order = random.Random(seed)
    calls: dict[str, int] = {}
    for name, call in providers.items():
        call()
        calls[name] = max(1, round(burst_ms / _burst_ms(call, 1)))
    times: dict[str, list[float]] = {name: [] for name in providers}
    for _ in range(rounds):
        for name in order.sample(list(providers), len(providers)):
            time.sleep(pause_s)
            times[name].append(_burst_ms(providers[name], calls[name]) / calls[name])
    result = {}
    for name, values in times.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
        result[name] = Timing(statistics.median(values), p20, p80)
    return result


def _burst_ms(call: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes that one call allocates at its peak, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def ceilings(dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """What this GPU does at most: a product of 8192 x 8192 matrices (TFLOP/s) and a copy (TB/s read and written)."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    times = interleaved({"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}, rounds=9)
    return {
        "matmul_tflops": 2 * size**3 / times["matmul"].ms / 1e9,
        "copy_tbps": 2 * source.nbytes / times["copy"].ms / 1e9,
    }


def write_rows(stem: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Append rows, each with the environment, to ``results/<stem>.jsonl``."""
    where = environment()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{stem}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **where}) + "\n")
    return path


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns wide enough for their longest cell."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    for line in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
