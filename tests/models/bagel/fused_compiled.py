# SPDX-License-Identifier: Apache-2.0
"""Compiles the decoder's fused kernels for sm_90 without a GPU; run by test_fused.py.

They move memory and do little else, so each has to load and store 16 bytes at a time and spill no registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unirl.models.bagel import fused_triton as kernels

REGISTER_BUDGET = 96
TYPES = {
    "eps": "fp32",
    "cos": "*fp32",
    "sin": "*fp32",
    "width": "i32",
    "tokens": "i32",
    "und_tokens": "i32",
    "size": "i64",
}


def check(kernel: Any, constants: dict[str, Any], num_warps: int) -> None:
    types = {n: "i64" if n.endswith("_stride") else TYPES.get(n, "*bf16") for n in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else kind for name, kind in types.items()}
    # As the launcher finds them: addresses, strides and sizes are multiples of 16.
    aligned = [
        n.endswith("_stride") or n in ("width", "size") or signature[n][0] == "*" for n in kernel.arg_names
    ]
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    accesses = set(re.findall(r"(?:ld|st)\.global\S*", compiled.asm["ptx"]))
    wide = {access for access in accesses if access.split(".")[-2] == "v4"}
    name = kernel.fn.__name__
    assert accesses and accesses == wide, f"{name} {constants}: {accesses - wide}"
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|LOCAL):(\d+)", usage.stdout)}
    assert found["REG"] <= REGISTER_BUDGET and found["LOCAL"] == 0, f"{name} {constants}: {found}"


def main() -> None:
    for backward in (False, True):
        check(kernels._norm_kernel, {"BACKWARD": backward, "BLOCK": 4096}, kernels.num_warps(4096))
        for num_heads, heads in ((28, 32), (4, 4)):
            shape = {"num_heads": num_heads, "HEADS": heads, "SIZE": 128}
            check(kernels._heads_kernel, {**shape, "BACKWARD": backward}, kernels.num_warps(heads * 128))
        check(kernels._silu_kernel, {"BACKWARD": backward, "BLOCK": kernels.SILU_BLOCK}, 8)
    print("compiled", triton.__version__)


if __name__ == "__main__":
    main()
