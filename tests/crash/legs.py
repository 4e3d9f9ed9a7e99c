# SPDX-License-Identifier: Apache-2.0
"""Legs of a run: drivers that are ended in the middle and started again, on a cluster that outlives them.

A driver is a process of its own, forked from one that has imported everything, so that a leg costs its workers' start alone.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

from unirl.config import to_plain
from unirl.distributed.failpoints import ONCE_VARIABLE, VARIABLE

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["unirl.entry", "unirl.trainer.async_diffusion"])
LEG_TIMEOUT_S = 300.0


def drive(recipe: Any, failpoint: str, once: str, output: str) -> None:
    """The whole of a driver process: what the entry point does with a recipe."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if failpoint:
        os.environ[VARIABLE] = failpoint
    if once:
        os.environ[ONCE_VARIABLE] = once
    from unirl.entry import run_recipe
    from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

    code = run_recipe(recipe, AsyncDiffusionTrainer)
    ray.shutdown()
    os._exit(code)


def leg(recipe: Any, failpoint: str = "", once: str = "") -> tuple[int, str]:
    """Runs a driver; (its exit code, negative for a signal; what it printed). `once`: see `unirl.distributed.failpoints`."""
    plain = {**to_plain(recipe), "ray_address": ray.get_runtime_context().gcs_address, "resume": "auto"}
    output = Path(f"{recipe.run_dir}.out")
    begin = output.stat().st_size if output.exists() else 0
    process = CONTEXT.Process(target=drive, args=(plain, failpoint, once, str(output)))
    process.start()
    process.join(LEG_TIMEOUT_S)
    text = output.read_bytes()[begin:].decode(errors="replace") if output.exists() else ""
    if process.is_alive():
        process.kill()
        raise AssertionError(f"a driver with {failpoint or 'no failpoint'} is still at work:\n{text}")
    assert process.exitcode is not None
    return process.exitcode, text


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def assert_nothing_is_left(timeout_s: float = 30.0) -> None:
    """All cores of the shared cluster are free again: no actor and no placement group outlives its driver."""
    deadline = time.monotonic() + timeout_s
    while ray.available_resources().get("CPU", 0) != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, f"still held: {ray.util.placement_group_table()}"
        time.sleep(0.3)
