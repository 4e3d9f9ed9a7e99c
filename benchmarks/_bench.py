# SPDX-License-Identifier: Apache-2.0
"""What the operators' benchmarks share: fair timing of peers in one process, ceilings of the same run, rows of results.

A device under load lowers its clock, so whoever runs after a hot neighbour looks slow. Every round therefore runs the
peers in a new random order, in bursts with a pause before each on a GPU, and medians are taken over the rounds. A burst
on a GPU waits in its queue until the host is ahead: what the device needs and what the host needs are told apart.

    python benchmarks/_bench.py [STEM ...]    # print and draw the newest rows in results/ again
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from _plots import draw, newest_rows
from _runs import IMAGES, RESULTS, ROOT, table

OPERATORS = ("sibling_prefix_attention", "packing", "digest", "flow", "guidance", "bagel")
FEWEST_ROUNDS = 3
HOST_TRIES = 3
LEAD = 1.5
"""How far the host goes ahead, in its own time for the calls of a burst."""
LONGEST_LEAD = 3.0  # in bursts
CYCLES_PER_MS = 2_000_000  # of a GPU's clock, at most
Call = Callable[[], Any]
Check = Callable[[str, Any], Mapping[str, Any]]
"""From a peer's name and result to columns of its row; ``error`` is one, ``note`` another."""


class Timing(NamedTuple):
    """Milliseconds of one call: the median over the rounds, and the 20th and 80th percentiles.

    On a GPU these are what the device needs while its queue is never empty; ``host_ms`` is what the host needs to put
    one call into the queue. A program that does nothing else waits for the larger of the two.
    """

    ms: float
    ms_p20: float
    ms_p80: float
    rounds: int
    host_ms: float | None


def environment() -> dict[str, Any]:
    """Hardware, its load, date, commit and versions: what a row of results is worth nothing without."""
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD") or "unknown",
    }
    if _git("status", "--porcelain", "--", "unirl", "csrc", "benchmarks", ":!benchmarks/results"):
        found["commit"] += "+changes"
    found["torch"] = torch.__version__
    for package in ("triton", "fa3-fwd", "xxhash"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["cpu"] = _cpu_name()
    found["threads"] = torch.get_num_threads()
    found["load"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        found["hardware"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def interleaved(
    providers: Mapping[str, Call],
    device: torch.device,
    *,
    rounds: int = 15,
    seconds: float = float("inf"),
    burst_ms: float = 10.0,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time each provider in bursts of about ``burst_ms``, in a new order each round.

    Rounds end when ``seconds`` are over, but not before the third.
    """
    begin = time.perf_counter()
    pause_s = 0.03 if device.type == "cuda" else 0.0
    order = random.Random(seed)
    calls: dict[str, int] = {}
    host_ms: dict[str, float | None] = {}
    for name, call in providers.items():
        call()
        one_ms = _burst_ms(call, 1, device)
        calls[name] = max(1, round(burst_ms / one_ms))
        tries = HOST_TRIES if one_ms < burst_ms else 1
        host_ms[name] = _host_ms(call, calls[name], tries) if device.type == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in providers}
    for done in range(rounds):
        if done >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        for name in order.sample(list(providers), len(providers)):
            time.sleep(pause_s)
            count = calls[name]
            lead_ms = min(LEAD * count * (host_ms[name] or 0.0), LONGEST_LEAD * burst_ms)
            times[name].append(_burst_ms(providers[name], count, device, lead_ms) / count)
    result = {}
    for name, values in times.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5) if len(values) > 1 else values * 4
        result[name] = Timing(statistics.median(values), p20, p80, len(values), host_ms[name])
    return result


def _burst_ms(call: Call, count: int, device: torch.device, lead_ms: float = 0.0) -> float:
    """Milliseconds of ``count`` calls; a GPU is kept busy for ``lead_ms`` first, so that the host is ahead of it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if lead_ms:
        torch.cuda._sleep(int(lead_ms * CYCLES_PER_MS))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _host_ms(call: Call, count: int, tries: int) -> float:
    """Milliseconds that the host needs for a call, the least of a few tries."""
    best = float("inf")
    for _ in range(tries):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begin) / count)
    torch.cuda.synchronize()
    return 1e3 * best


def peak_bytes(call: Call) -> int:
    """Bytes of the GPU that one call allocates at its peak, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def ceilings(device: torch.device, quick: bool = False) -> dict[str, float]:
    """What a device does at most: a matrix product (TFLOP/s) and a copy (TB/s read and written).

    On a GPU 8192 x 8192 bfloat16 matrices and 1 GiB; on a CPU 1024 x 1024 float32 and 256 MiB, on torch's threads.
    """
    on_gpu = device.type == "cuda"
    size, num_bytes = (8192, 1 << 30) if on_gpu else (1024, 1 << 28)
    if quick:
        size, num_bytes = 256, 1 << 20
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.ones(num_bytes // 4, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    providers = {"matmul": lambda: left @ right, "copy": lambda: target.copy_(source)}
    times = interleaved(providers, device, rounds=3 if quick else 9)
    return {
        "matmul_tflops": 2 * size**3 / times["matmul"].ms / 1e9,
        "copy_tbps": 2 * source.nbytes / times["copy"].ms / 1e9,
    }


def write_rows(stem: str, rows: Sequence[Mapping[str, Any]], folder: Path = RESULTS) -> Path:
    """Append rows, each with the environment, to ``<folder>/<stem>.jsonl``."""
    where = environment() | {"at": datetime.now(UTC).isoformat(timespec="seconds")}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.jsonl"
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**where, **row}) + "\n")
    return path


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns wide enough for their longest cell."""
    print(table(list(header), [list(row) for row in rows]))


def device_of(options: argparse.Namespace) -> str:
    """What ``--device`` says, else the GPU when there is one."""
    return options.device or ("cuda" if torch.cuda.is_available() else "cpu")


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every operator's benchmark takes."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--device", choices=("cpu", "cuda"), help="default: the GPU when there is one")
    found.add_argument(
        "--seconds", type=float, default=30.0, help="about how long to measure in all (default: 30)"
    )
    found.add_argument("--rounds", type=int, default=15, help="at most so many rounds a case (default: 15)")
    found.add_argument("--slow-peers", action="store_true", help="also peers that compile first (GPU only)")
    found.add_argument("--quick", action="store_true", help="tiny shapes: only whether everything runs")
    found.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the rows; the plot goes there too when given"
    )
    found.add_argument("--no-plot", action="store_true", help="write rows only")
    found.add_argument("--no-write", action="store_true", help="write neither rows nor a plot")
    return found


class Bench:
    """One run of an operator's benchmark: measures cases, keeps their rows, and at its end prints and writes them.

    Args:
        stem: names the files of results.
        options: what :func:`parser` parsed.
        num_cases: how often :meth:`measure` will be called; the seconds are shared out among the calls.
    """

    def __init__(self, stem: str, options: argparse.Namespace, num_cases: int) -> None:
        self.stem = stem
        self.options = options
        self.device = torch.device(device_of(options))
        self.slow_peers = options.slow_peers and self.device.type == "cuda"
        self.rows: list[dict[str, Any]] = []
        self._end = time.perf_counter() + options.seconds
        self._cases_left = num_cases
        torch.manual_seed(time.time_ns() % 2**31)
        self.limits = {self.device.type: ceilings(self.device, options.quick)}

    def measure(
        self,
        op: str,
        mode: str,
        shape: Mapping[str, Any],
        providers: Mapping[str, Call],
        *,
        check: Check = lambda name, result: {},
        flop: float = 0.0,
        moved_bytes: float = 0.0,
        device: torch.device | None = None,
        **columns: Any,
    ) -> None:
        """Check and time peers that do the same work; a peer that raises is kept as missing, with its error.

        Args:
            op, mode, shape, columns: what a row says about the case.
            check: is called with each peer's name and result before anything is timed.
            flop: operations that the task needs, whoever does it; or
            moved_bytes: bytes that it has to read and to write.
            device: when it is not the benchmark's.
        """
        device = device or self.device
        if device.type not in self.limits:
            self.limits[device.type] = ceilings(device, self.options.quick)
        limits = self.limits[device.type]
        case = {"op": op, "mode": mode, "shape": dict(shape), "device": device.type, **columns}
        found: dict[str, dict[str, Any]] = {}
        for name, call in providers.items():
            try:
                found[name] = dict(check(name, call()))
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                self.rows.append({**case, "provider": name, "missing": reason[:200]})
            if device.type == "cuda":
                torch.cuda.empty_cache()
        present = {name: providers[name] for name in found}
        rounds = 2 if self.options.quick else self.options.rounds
        timings = interleaved(present, device, rounds=rounds, seconds=self._share())
        for name, timing in timings.items():
            row = {**case, "provider": name}
            row |= {key: value for key, value in timing._asdict().items() if value is not None}
            if flop:
                row["tflops"] = flop / timing.ms / 1e9
                row["of_matmul"] = row["tflops"] / limits["matmul_tflops"]
            if moved_bytes:
                row["gbps"] = moved_bytes / timing.ms / 1e6
                row["of_copy"] = row["gbps"] / 1e3 / limits["copy_tbps"]
            if device.type == "cuda":
                row["peak_mb"] = peak_bytes(present[name]) / 1e6
            row |= found[name] | limits
            self.rows.append({key: _shortened(value) for key, value in row.items()})

    def _share(self) -> float:
        left = max(self._cases_left, 1)
        self._cases_left -= 1
        return max(0.0, self._end - time.perf_counter()) / left

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Print and write what was measured, also when the run breaks off."""
        _print_rows(self.rows)
        if self.options.no_write or not self.rows:
            return
        folder = self.options.results
        path = write_rows(self.stem, self.rows, folder)
        print(f"\nrows appended to {path}")
        if not self.options.no_plot and (image := draw(path, IMAGES if folder == RESULTS else folder)):
            print(f"drawn: {image}")


def _shortened(value: Any) -> Any:
    """A number to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    limits = {row.get("device", "cuda"): row for row in rows if "copy_tbps" in row}
    for device, row in limits.items():
        print(
            f"{device}: matrix product {row['matmul_tflops']:.4g} TFLOP/s, copy {row['copy_tbps']:.4g} TB/s"
        )
    header = ["provider", "ms", "host ms", "TFLOP/s", "GB/s", "of ceiling", "peak MB", "error", "note"]
    cases: dict[str, list[list[str]]] = {}
    for row in rows:
        shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
        parts = [
            row["op"],
            row["mode"],
            shape,
            row.get("dtype", ""),
            row.get("renorm", ""),
            row.get("device", ""),
        ]
        limit = row.get("of_matmul", row.get("of_copy"))
        cells = [
            row["provider"],
            _number(row.get("ms"), ".4g"),
            _number(row.get("host_ms"), ".3g"),
            _number(row.get("tflops"), ".4g"),
            _number(row.get("gbps"), ".4g"),
            _number(limit, ".1%"),
            _number(row.get("peak_mb"), ".1f"),
            _number(row.get("error"), ".2g"),
            f"missing: {row['missing']}" if "missing" in row else row.get("note", ""),
        ]
        cases.setdefault(", ".join(part for part in parts if part), []).append(cells)
    for title, lines in cases.items():
        used = [i for i in range(len(header)) if any(line[i] for line in lines)]
        print(f"\n{title}")
        print_table([header[i] for i in used], [[line[i] for i in used] for line in lines])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def main() -> None:
    stems = argparse.ArgumentParser(description="Print and draw the newest run of operators' benchmarks.")
    stems.add_argument("stems", nargs="*", default=OPERATORS, help=f"of {', '.join(OPERATORS)}; default: all")
    for stem in stems.parse_args().stems:
        path = RESULTS / f"{stem}.jsonl"
        if path.exists():
            rows = newest_rows(path)
            print(f"\n== {stem}: {rows[0].get('hardware', rows[0].get('cpu'))}, {rows[0]['date']}")
            _print_rows(rows)
            print(draw(path, IMAGES))


if __name__ == "__main__":
    main()
