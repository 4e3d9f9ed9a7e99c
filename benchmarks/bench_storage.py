# SPDX-License-Identifier: Apache-2.0
"""Padded or ragged trajectories: at which spread of canvases each of them wins.

    python benchmarks/bench_storage.py

Large: 32 rows of 64-channel bfloat16 latents, five frames a row, under a bound of 4096 tokens, in mixes from "all at the
bound" to "one at the bound". Small: 120 rows of the digits model. For both storages: bytes; seconds to store what a stage made, to
hand it over through Ray's object store (in, out, rows selected), and to read every trained transition in micros of one canvas. The
two take turns; medians. Results go to `results/storage.jsonl`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

import torch
from _runs import record

from unirl.distributed.payload import pack_segment, unpack_segment
from unirl.types import LatentSegment

STEPS = [0, 2]
KEPT = [0, 1, 2, 3, 14]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of a model: the bound in tokens, channels a token, rows a micro."""

    bound: int
    channels: int
    micro: int
    dtype: torch.dtype


LARGE = Shape(4096, 64, 8, torch.bfloat16)
DIGITS = Shape(36, 4, 60, torch.float32)
MIXES: dict[str, tuple[Shape, list[int]]] = {
    "all at the bound": (LARGE, [4096] * 32),
    "1 of 32 smaller": (LARGE, [2304] + [4096] * 31),
    "1 of 8 smaller": (LARGE, [2304] * 4 + [4096] * 28),
    "half at 768 x 768": (LARGE, [2304] * 16 + [4096] * 16),
    "512, 768 and 1024, 23 : 5 : 4": (LARGE, [1024] * 23 + [2304] * 5 + [4096] * 4),
    "1 of 32 at the bound": (LARGE, [1024] * 31 + [4096]),
    "all at 512 x 512": (LARGE, [1024] * 32),
    "digits, all at the bound": (DIGITS, [36] * 120),
    "digits, three canvases": (DIGITS, [16] * 48 + [36] * 36 + [24] * 36),
}


def store(frames: list[torch.Tensor], bound: int, storage: str) -> LatentSegment:
    """What a stage does with the frames it has kept."""
    rows = len(frames)
    return LatentSegment.pack(
        frames,
        frame_steps=torch.tensor([KEPT] * rows),
        sde_steps=torch.tensor([STEPS] * rows),
        log_probs=torch.zeros(rows, len(STEPS)),
        sigmas=torch.linspace(1, 0, 15, dtype=torch.float64).repeat(rows, 1),
        pad_to=bound,
        storage=storage,  # type: ignore[arg-type]
    )


def hand_over(segment: LatentSegment) -> LatentSegment:
    """Through the object store, as a rollout worker and a training rank do it."""
    import ray

    payload = ray.get(ray.put(pack_segment(segment)))
    return unpack_segment(payload).select(list(range(len(segment))))


def read(segment: LatentSegment, micro_size: int) -> int:
    """Every trained transition's two latents, in micros of one canvas, without padding, as a replay reads them."""
    elements = 0
    counts = segment.token_counts.tolist()
    for count in dict.fromkeys(counts):
        rows = [row for row, other in enumerate(counts) if other == count]
        for start in range(0, len(rows), micro_size):
            micro = segment.select(rows[start : start + micro_size])
            for slot in range(len(STEPS)):
                at = micro.sde_steps[:, slot]
                for steps in (at, at + 1):
                    elements += micro.frame(steps)[:, :count].contiguous().numel()
    return elements


def timed(work: Any, *arguments: Any) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - begin, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    torch.set_num_threads(1)
    ray.init(
        address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=2**30
    )
    rows = []
    for name, (shape, counts) in MIXES.items():
        generator = torch.Generator().manual_seed(0)
        frames = [
            torch.randn(len(KEPT), count, shape.channels, generator=generator).to(shape.dtype)
            for count in counts
        ]
        seconds: dict[tuple[str, str], list[float]] = {}
        row: dict[str, Any] = {"mix": name, "factor": round(shape.bound * len(counts) / sum(counts), 3)}
        for repeat in range(options.repeats + 1):
            for storage in ("padded", "ragged") if repeat % 2 else ("ragged", "padded"):
                stored_s, segment = timed(store, frames, shape.bound, storage)
                moved_s, there = timed(hand_over, segment)
                read_s, elements = timed(read, there, shape.micro)
                assert elements == 4 * shape.channels * sum(counts)
                row[f"{storage} MB"] = round(segment.nbytes() / 1e6, 2)
                if repeat:  # the first round warms up
                    for phase, value in (("store", stored_s), ("move", moved_s), ("read", read_s)):
                        seconds.setdefault((storage, phase), []).append(value)
        for (storage, phase), values in sorted(seconds.items()):
            row[f"{storage} {phase} ms"] = round(1e3 * statistics.median(values), 2)
        for storage in ("padded", "ragged"):
            row[f"{storage} all ms"] = round(
                sum(1e3 * statistics.median(seconds[storage, phase]) for phase in ("store", "move", "read")),
                2,
            )
        rows.append(row)
        print(row, flush=True)
    ray.shutdown()
    print(record("storage", rows))


if __name__ == "__main__":
    main()
