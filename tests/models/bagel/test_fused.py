# SPDX-License-Identifier: Apache-2.0
"""The decoder's fused kernels without a GPU, in a process of their own."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "triton", reason="Triton comes with torch's GPU builds; CI installs it beside the CPU build"
)
from tests.ops.triton_versions import VERSIONS, run_script, used_version


@pytest.mark.parametrize("version", VERSIONS)
def test_interpreted_kernels_equal_the_formulas(version: str) -> None:
    script = "../models/bagel/fused_interpreted.py"
    assert run_script(script, version=version) == f"equal {used_version(version)}"


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_compile_for_sm_90_and_move_16_bytes_at_a_time(version: str) -> None:
    script = "../models/bagel/fused_compiled.py"
    assert run_script(script, version=version) == f"compiled {used_version(version)}"
