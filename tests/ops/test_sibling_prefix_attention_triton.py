# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the attention: interpreted on the CPU, compiled for Hopper, run on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.ops import attention_triton_cases as cases

ROOT = Path(__file__).parents[2]
FLOAT16_ERROR = 1e-3
FLOAT32_ERROR = 1e-6


def run_cases(*arguments: str, **environment: str) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/ops/attention_triton_cases.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    return run_cases("interpret", TRITON_INTERPRET="1")


@pytest.mark.xdist_group("attention_triton")
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreted_kernels_equal_float64(name: str, interpreted: dict[str, dict[str, float]]) -> None:
    bound = FLOAT16_ERROR if cases.CASES[name][7] is torch.float16 else FLOAT32_ERROR
    errors = interpreted[name]
    assert set(errors) == {"out", "lse", "query", "key", "value", "prefix_key", "prefix_value"}
    assert all(error < bound for error in errors.values()), errors  # a NaN is not below the bound


@pytest.mark.slow
@pytest.mark.parametrize("head_size", [64, 128])
def test_hopper_code_stays_within_registers_and_shared_memory(head_size: int) -> None:
    found = run_cases("compile", str(head_size))
    assert set(found) == {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    for name, usage in found.items():
        assert usage["spilled"] == 0, (name, usage)
        assert usage["registers"] <= 255 and usage["shared"] <= 232448, (name, usage)


def test_prefix_shares_fill_the_gpu_and_never_exceed_the_siblings() -> None:
    from unirl.ops.triton.sibling_prefix_attention import prefix_shares

    assert prefix_shares(16, 4, 64, 128, torch.bfloat16) == 16
    assert prefix_shares(1, 4, 64, 128, torch.bfloat16) == 1
    assert prefix_shares(8, 32, 9000, 128, torch.bfloat16) == 1
