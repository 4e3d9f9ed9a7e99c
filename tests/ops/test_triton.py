# SPDX-License-Identifier: Apache-2.0
"""The elementwise Triton kernels without a GPU, each script in its own process (a bad compilation aborts Python)."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "triton", reason="Triton comes with torch's GPU builds; CI installs it beside the CPU build"
)
from tests.ops.triton_versions import VERSIONS, run_script, used_version


@pytest.mark.parametrize("version", VERSIONS)
def test_interpreted_kernels_equal_the_cpu(version: str) -> None:
    assert run_script("triton_interpreted.py", version=version) == f"equal {used_version(version)}"


@pytest.mark.parametrize("version", VERSIONS)
def test_kernels_compile_for_sm_90_within_their_budgets(version: str) -> None:
    assert run_script("triton_compiled.py", version=version) == f"compiled {used_version(version)}"
