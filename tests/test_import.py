# SPDX-License-Identifier: Apache-2.0
"""Importing the package starts no process, touches no GPU and needs no network."""

from __future__ import annotations

import subprocess
import sys

PROBE = """
import os, socket, subprocess, sys, threading

def refuse(*args, **kwargs):
    raise AssertionError("importing opened a socket or started a process")

socket.socket.connect = refuse
subprocess.Popen.__init__ = refuse
os.fork = refuse
before = threading.active_count()
import {module}
import torch
assert not torch.cuda.is_initialized()
assert threading.active_count() == before, threading.enumerate()
print(",".join(sorted(m for m in ("ray", "diffusers", "transformers", "peft", "unirl.models") if m in sys.modules)))
"""


def loaded_by(module: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [name for name in done.stdout.strip().split(",") if name]


def test_importing_the_package_starts_nothing() -> None:
    assert loaded_by("unirl") == []


def test_operators_load_neither_ray_nor_diffusers_nor_a_model() -> None:
    assert loaded_by("unirl.ops") == []


def test_importing_a_trainer_starts_nothing() -> None:
    assert "ray" in loaded_by("unirl.trainer.async_diffusion")
