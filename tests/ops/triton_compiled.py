# SPDX-License-Identifier: Apache-2.0
"""Compiles the elementwise Triton kernels for sm_90 without a GPU, with budgets; run by test_triton.py.

A fused multiply-add would change bits (the launchers forbid it), stack or local memory means spilled registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unirl.ops.triton import flow, guidance, noise

REGISTER_BUDGET = 128

TYPES = {
    "seed": "i64",
    "step": "i32",
    "stream": "i32",
    "renorm_min": "fp32",
    "keys": "*i64",
    "lengths": "*i64",
    "partial": "*fp64",
    "sums": "*fp64",
    "text_scales": "*fp64",
    "image_scales": "*fp64",
    "log_prob": "*fp32",
    "scale_out": "*fp32",
    "grad_log_prob": "*fp32",
    "mean_out": "*fp32",
    "sample": "*fp32",
}


def type_of(name: str) -> str:
    if name in TYPES:
        return TYPES[name]
    if name.endswith("_of"):
        return "*fp64"
    if name.endswith("_stride"):
        return "i64"
    return "i32" if name in ("row_size", "seq", "per_token", "channels", "chunks", "blocks") else "*bf16"


def check(kernel: Any, constants: dict[str, Any], fused: bool) -> None:
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "enable_fp_fusion": fused})
    name = kernel.fn.__name__
    if not fused:
        assert "fma.rn.f32" not in compiled.asm["ptx"], f"{name} fuses multiply and add"
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    spilled = found["STACK"] + found["LOCAL"]
    assert found["REG"] <= REGISTER_BUDGET and spilled == 0, (
        f"{name}: {found['REG']} registers, {spilled} bytes spilled"
    )


def main() -> None:
    check(noise._noise_kernel, {"CHUNK": noise.CHUNK}, fused=False)
    common = {"HAS_LENGTHS": True, "COMPUTE": tl.float32, "CHUNK": flow.CHUNK}
    for rule in range(3):
        options = {**common, "RULE": rule}
        check(flow._step_kernel, options, fused=False)
        check(flow._replay_kernel, {**options, "WITH_MEAN": True}, fused=False)
        check(flow._gradient_kernel, {**options, "HAS_GRAD_MEAN": True}, fused=False)
        finish = {"RULE": rule, "HAS_LENGTHS": True, "WITH_SCALE": True, "BLOCK": flow.FINISH_BLOCK}
        check(flow._finish_kernel, finish, fused=False)
    for backward in (False, True):
        options = {
            "BACKWARD": backward,
            "HAS_TEXT": True,
            "HAS_IMAGE": True,
            "HAS_LENGTHS": True,
            "COMPUTE": tl.float32,
        }
        for text_channel in (False, True):
            tile = {
                "TEXT_CHANNEL": text_channel,
                "SCALED": True,
                "TOKENS": guidance.TILE // 64,
                "CHANNELS": 64,
            }
            check(guidance._token_kernel, {**options, **tile}, fused=True)
        check(guidance._row_sums_kernel, {**options, "TILE": guidance.TILE}, fused=True)
        sums = {"TILE": guidance.TILE, "SUM_BLOCK": guidance.SUM_BLOCK}
        check(guidance._row_apply_kernel, {**options, **sums}, fused=True)
    print("compiled", triton.__version__)


if __name__ == "__main__":
    main()
