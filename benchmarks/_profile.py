# SPDX-License-Identifier: Apache-2.0
"""Where the time of one call goes: its kernels by time, and what is left between them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from _bench import print_table
from torch.profiler import ProfilerActivity, profile

TOP = 25
GROUPS = {
    "attention": r"sibling_attention|sdpa|flash|fmha|attention",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|splitk|\bmatmul|\b(add|b)?mm\b|wgmma",
    "copies, casts": r"memcpy|memset|copy|catarray|::cat$|fillfunctor|fill_",
}
REST = "norms, elementwise"


class Kernel(NamedTuple):
    """All launches of one kernel in a call."""

    name: str
    launches: int
    ms: float

    @property
    def group(self) -> str:
        """The first of `GROUPS` that its name fits, else `REST`."""
        return next((g for g, names in GROUPS.items() if re.search(names, self.name, re.I)), REST)


def kernels_of(call: Callable[[], Any], device: torch.device) -> tuple[list[Kernel], float]:
    """The kernels of one call (on a CPU its operators), and its milliseconds with the profiler at work."""
    on_gpu = device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    call()
    if on_gpu:
        torch.cuda.synchronize()
    with profile(activities=[activity]) as profiler:
        begin = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - begin)
    found = []
    for event in profiler.key_averages():
        spent_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == kind and spent_us:
            found.append(Kernel(event.key, event.count, spent_us / 1e3))
    return found, wall_ms


def print_profile(title: str, kernels: Iterable[Kernel], wall_ms: float, top: int = TOP) -> None:
    """Groups with their share of the wall, what no kernel covers, and the ``top`` longest kernels."""
    kernels = sorted(kernels, key=lambda kernel: -kernel.ms)
    busy_ms = sum(kernel.ms for kernel in kernels)
    launches = sum(kernel.launches for kernel in kernels)
    print(
        f"\n{title}: {wall_ms:.1f} ms, kernels {busy_ms:.1f} ms in {launches} launches, "
        f"between them {wall_ms - busy_ms:.1f} ms"
    )
    lines = []
    for group in (*GROUPS, REST):
        members = [kernel for kernel in kernels if kernel.group == group]
        spent_ms = sum(kernel.ms for kernel in members)
        count = sum(kernel.launches for kernel in members)
        lines.append([group, f"{spent_ms:.2f}", f"{spent_ms / wall_ms:.1%}", str(count), ""])
    for kernel in kernels[:top]:
        share = f"{kernel.ms / wall_ms:.1%}"
        lines.append([kernel.group, f"{kernel.ms:.2f}", share, str(kernel.launches), _short(kernel.name)])
    print_table(["group", "ms", "of wall", "launches", "kernel"], lines)


def _short(name: str) -> str:
    """Without namespaces that all share, and not longer than a line."""
    for lost in ("void ", "at::native::", "(anonymous namespace)::", "std::", "c10::"):
        name = name.replace(lost, "")
    return name if len(name) <= 110 else f"{name[:107]}..."
