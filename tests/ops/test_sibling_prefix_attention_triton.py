# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the attention: interpreted on the CPU, compiled for Hopper, run on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.ops import attention_triton_cases as cases
from tests.ops.triton_versions import VERSIONS, run_script, used_version

FLOAT16_ERROR = 1e-3
FLOAT32_ERROR = 1e-6


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, float]]:
    return interpret("installed")


def interpret(version: str) -> dict[str, dict[str, float]]:
    report = json.loads(
        run_script("attention_triton_cases.py", "interpret", version=version, TRITON_INTERPRET="1")
    )
    assert report["triton"] == used_version(version)
    return report["kernels"]


@pytest.mark.xdist_group("attention_triton")
@pytest.mark.parametrize("name", list(cases.CASES))
def test_interpreted_kernels_equal_float64(name: str, interpreted: dict[str, dict[str, float]]) -> None:
    check_errors(name, interpreted[name])


@pytest.mark.slow
def test_interpreted_kernels_equal_float64_with_the_oldest_triton() -> None:
    for name, errors in interpret("3.6.0").items():
        check_errors(name, errors)


def check_errors(name: str, errors: dict[str, float]) -> None:
    bound = FLOAT16_ERROR if cases.CASES[name][7] is torch.float16 else FLOAT32_ERROR
    assert set(errors) == {"out", "lse", "query", "key", "value", "prefix_key", "prefix_value"}
    assert all(error < bound for error in errors.values()), errors  # a NaN is not below the bound


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_hopper_code_stays_within_registers_and_shared_memory(head_size: int, version: str) -> None:
    report = json.loads(run_script("attention_triton_cases.py", "compile", str(head_size), version=version))
    assert report["triton"] == used_version(version)
    found = report["kernels"]
    assert set(found) == {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    for name, usage in found.items():
        assert usage["spilled"] == 0, (name, usage)
        assert usage["registers"] <= 255 and usage["shared"] <= 232448, (name, usage)


def test_prefix_shares_fill_the_gpu_and_never_exceed_the_siblings() -> None:
    from unirl.ops.triton.sibling_prefix_attention import prefix_shares

    assert prefix_shares(16, 4, 64, 128, torch.bfloat16) == 16
    assert prefix_shares(1, 4, 64, 128, torch.bfloat16) == 1
    assert prefix_shares(8, 32, 9000, 128, torch.bfloat16) == 1
