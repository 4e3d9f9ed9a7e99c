# SPDX-License-Identifier: Apache-2.0
"""The elementwise Triton kernels without a GPU, each script in its own process (a bad compilation aborts Python)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="Triton comes with torch's GPU builds; CI installs it beside the CPU build"
)
HERE = Path(__file__).parent


def run(script: str) -> str:
    environment = dict(
        os.environ, PYTHONPATH=f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    result = subprocess.run(
        [sys.executable, HERE / script], capture_output=True, text=True, timeout=280, env=environment
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout.strip()


def test_interpreted_kernels_equal_the_cpu() -> None:
    assert run("triton_interpreted.py") == "equal"


def test_kernels_compile_for_sm_90_within_their_budgets() -> None:
    assert run("triton_compiled.py") == "compiled"
