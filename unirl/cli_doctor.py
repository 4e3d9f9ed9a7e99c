# SPDX-License-Identifier: Apache-2.0
"""What `unirl doctor` looks at.

For everything that is missing, what it is needed for and the command that brings it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from unirl.cores import usable_cores

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
GIB = 2**30
LITTLE_MEMORY_BYTES = 4 * GIB
LITTLE_SHARED_MEMORY_BYTES = 1 * GIB

INSTALL = "pip install ."
REBUILD = "pip install --force-reinstall --no-deps .   (from the checkout; needs a C++17 compiler)"


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        found: version, size or path; "missing" when `good` is False.
        good: whether it is there and usable.
        demo: whether the demo needs it.
        needed_for: what does not work without it.
        fix: the command that brings it.
    """

    name: str
    found: str
    good: bool
    demo: bool = False
    needed_for: str = ""
    fix: str = ""

    @property
    def prevents_demo(self) -> bool:
        return self.demo and not self.good


def examine() -> list[Check]:
    """Looks at everything; starts no process and reserves no GPU memory."""
    return [
        check_python(sys.version_info[:2]),
        *_check_torch(),
        check_package("triton", "triton", needed_for="the GPU kernels", fix="pip install triton"),
        check_package(
            "ray", "ray", demo=True, needed_for="training: its workers are Ray actors", fix=INSTALL
        ),
        check_package("hydra-core", "hydra", demo=True, needed_for="reading recipes", fix=INSTALL),
        check_package("peft", "peft", demo=True, needed_for="LoRA adapters", fix=INSTALL),
        check_package(
            "diffusers", "diffusers", demo=True, needed_for="image decoders and their schedulers", fix=INSTALL
        ),
        check_package("transformers", "transformers", demo=True, needed_for="tokenizers", fix=INSTALL),
        check_package(
            "safetensors", "safetensors", demo=True, needed_for="reading and writing weights", fix=INSTALL
        ),
        check_package(
            "matplotlib", "matplotlib", demo=True, needed_for="the curves of the report", fix=INSTALL
        ),
        check_package("tensorboard", "tensorboard", demo=True, needed_for="logging.tensorboard", fix=INSTALL),
        check_package("rich", "rich", demo=True, needed_for="the progress bar", fix=INSTALL),
        check_package(
            "scikit-learn",
            "sklearn",
            demo=True,
            needed_for="the digits recipes: the scans come with it",
            fix='pip install ".[demo]"',
        ),
        check_package("wandb", "wandb", needed_for="logging.wandb: true", fix='pip install ".[wandb]"'),
        *_check_extension(),
        *_check_machine(),
    ]


def render(checks: Sequence[Check]) -> str:
    """A line a check, what to do about the rest below it, and a last line that says whether the demo can run."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        mark = "ok  " if check.good else ("MISS" if check.demo else "--  ")
        lines.append(f"{mark} {check.name:{width}}  {check.found}")
        if not check.good:
            lines.append(f"     {'':{width}}  needed for: {check.needed_for}")
            lines.append(f"     {'':{width}}  get it by:  {check.fix}")
    preventing = [check.name for check in checks if check.prevents_demo]
    verdict = f"the demo cannot run: {', '.join(preventing)}" if preventing else "the demo can run: make demo"
    return "\n".join([*lines, "", verdict])


def check_python(version: tuple[int, ...]) -> Check:
    """Whether the interpreter is new enough."""
    return Check(
        "Python",
        ".".join(map(str, version)),
        good=tuple(version) >= OLDEST_PYTHON,
        demo=True,
        needed_for="everything",
        fix=f"make clean, then make demo PYTHON=python{'.'.join(map(str, OLDEST_PYTHON))} or a newer one",
    )


def check_package(
    distribution: str,
    module: str,
    *,
    needed_for: str,
    fix: str,
    demo: bool = False,
    oldest: tuple[int, ...] = (),
) -> Check:
    """Whether a package can be imported and is new enough, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return Check(distribution, "missing", False, demo, needed_for, fix)
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(oldest)])
    if numbers < oldest:
        wanted = ".".join(map(str, oldest))
        return Check(distribution, f"{version}, older than {wanted}", False, demo, needed_for, fix)
    return Check(distribution, version, True, demo, needed_for, fix)


def _check_torch() -> list[Check]:
    fix = "pip install torch   (or a wheel that fits your GPU; make demo TORCH=...)"
    check = check_package("torch", "torch", demo=True, needed_for="everything", fix=fix, oldest=OLDEST_TORCH)
    if not check.good:
        return [check]
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [
        dataclasses.replace(check, found=f"{check.found}, {build}"),
        Check(
            "GPUs",
            ", ".join(gpus) if gpus else "none visible",
            good=bool(gpus),
            needed_for="models of full size; the digits recipes run on the CPU",
            fix="a CUDA build of torch and the NVIDIA driver; check nvidia-smi and CUDA_VISIBLE_DEVICES",
        ),
    ]


def _check_extension() -> list[Check]:
    try:
        from unirl import _C  # type: ignore[attr-defined]
    except ImportError as error:
        absent = importlib.util.find_spec("unirl._C") is None
        found = "missing" if absent else f"does not load: {error}"
        purpose = 'the native CPU operators (backend="native"); without them the slower PyTorch ones are used'
        return [Check("CPU extension", found, False, needed_for=purpose, fix=REBUILD)]
    architectures = _C.cuda_architectures
    return [
        Check("CPU extension", "built", True),
        Check(
            "CUDA extension",
            f"built for {architectures}" if architectures else "not built",
            good=bool(architectures),
            needed_for="packing and digests on a GPU",
            fix=f"with nvcc on PATH (or CUDA_HOME set): UNIRL_BUILD_CUDA=1 {REBUILD}",
        ),
    ]


def _check_machine() -> list[Check]:
    cores = len(usable_cores())
    memory_bytes = _available_memory_bytes()
    shared_bytes = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    return [
        Check(
            "cores",
            str(cores),
            good=cores >= 2,
            needed_for="overlap of training and rollout: one core each; with one core it is slower, not wrong",
            fix="give the machine or container a second core",
        ),
        Check(
            "memory",
            f"{memory_bytes / GIB:.1f} GiB available",
            good=memory_bytes >= LITTLE_MEMORY_BYTES,
            needed_for=f"Ray and its workers: {LITTLE_MEMORY_BYTES // GIB} GiB for the demo",
            fix="close other programs, or raise the container's limit",
        ),
        Check(
            "/dev/shm",
            f"{shared_bytes / GIB:.1f} GiB",
            good=shared_bytes >= LITTLE_SHARED_MEMORY_BYTES,
            needed_for="Ray's object store, which falls back to slower disk files",
            fix="mount -o remount,size=4G /dev/shm   (Docker: --shm-size=4g)",
        ),
    ]


def _available_memory_bytes() -> int:
    """Of the machine, or of the container when its limit is lower."""
    available = 0
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, max(int(limit.read_text()) - int(used.read_text()), 0))
    return available
