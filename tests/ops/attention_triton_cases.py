# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton attention kernels where no GPU is, in a process of its own, and prints JSON.

``interpret``: errors against float64 (set TRITON_INTERPRET=1). ``compile``: registers, spills and shared memory of the
kernels compiled for sm_90, which can end the process when the compiler fails.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.ops.triton import sibling_prefix_attention as kernels

# name: groups, siblings, query heads, key heads, L, P, head size, dtype, prefix lengths
CASES: dict[str, tuple[int, int, int, int, int, int, int, torch.dtype, list[int] | None]] = {
    "both regions end inside a tile": (1, 2, 4, 2, 37, 21, 64, torch.float32, None),
    "prefix fills its tiles": (1, 2, 3, 1, 34, 64, 64, torch.float32, None),
    "no prefix": (1, 2, 2, 2, 33, 0, 64, torch.float32, None),
    "one token each": (1, 1, 2, 1, 1, 1, 128, torch.float32, None),
    "ragged, one group without a prefix": (3, 1, 2, 1, 20, 40, 64, torch.float32, [40, 7, 0]),
    "float16": (1, 3, 3, 1, 70, 65, 64, torch.float16, None),
}


def joint_attention(
    query: Tensor, key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """The definition, row by row: softmax over the real prefix and own keys, copied together."""
    outs, sums = [], []
    ratio = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        group = row // (query.shape[0] // prefix_key.shape[0])
        count = lengths[group]
        keys = torch.cat([prefix_key[group, :, :count], key[row]], 1).repeat_interleave(ratio, 0)
        values = torch.cat([prefix_value[group, :, :count], value[row]], 1).repeat_interleave(ratio, 0)
        logits = query[row] @ keys.transpose(1, 2) * query.shape[3] ** -0.5
        outs.append(torch.softmax(logits, -1) @ values)
        sums.append(torch.logsumexp(logits, -1))
    return torch.stack(outs), torch.stack(sums)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm; that of ``got`` itself where nothing is wanted."""
    return float((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-12))


def interpret(name: str) -> dict[str, float]:
    """Relative errors of output, log-sum-exp and the five gradients of one case."""
    groups, siblings, query_heads, key_heads, length, prefix, head_size, dtype, lengths = CASES[name]
    torch.manual_seed(len(name))
    rows = groups * siblings
    shapes = {
        "query": (rows, length, query_heads, head_size),
        "key": (rows, length, key_heads, head_size),
        "value": (rows, length, key_heads, head_size),
        "prefix_key": (groups, prefix, key_heads, head_size),
        "prefix_value": (groups, prefix, key_heads, head_size),
    }
    low = {name: torch.randn(shape).to(dtype).transpose(1, 2) for name, shape in shapes.items()}
    exact = {name: tensor.double().requires_grad_() for name, tensor in low.items()}
    wanted, wanted_lse = joint_attention(*exact.values(), lengths or [prefix] * groups)
    grad_out = torch.randn(wanted.shape).to(dtype)
    grads = torch.autograd.grad(wanted, list(exact.values()), grad_out.double())
    if lengths is not None:
        for group, count in enumerate(lengths):  # what lies behind a prefix must not matter
            low["prefix_key"][group, :, count:] = float("nan")
            low["prefix_value"][group, :, count:] = float("nan")
    counts = None if lengths is None else torch.tensor(lengths)
    scale = head_size**-0.5
    out, lse = kernels.forward(*low.values(), counts, scale)
    got = kernels.backward(grad_out, *low.values(), out, lse, counts, scale)
    errors = {
        "out": relative_error(out, wanted.detach()),
        "lse": float((lse - wanted_lse.detach()).abs().max()),
    }
    for argument, grad, exact_grad in zip(shapes, got, grads, strict=True):
        errors[argument] = relative_error(grad, exact_grad)
    return errors


def compile_for_hopper(head_size: int) -> dict[str, dict[str, int]]:
    """Registers, spilled bytes and shared memory of each kernel, bfloat16, as ``forward`` and ``backward`` launch it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    dtype = torch.bfloat16
    constants = {"key_heads": 4, "ratio": 7, "ragged": False, "head_size": head_size}
    tilings = {
        "forward_kernel": kernels.forward_tiling(head_size, dtype),
        "query_gradient_kernel": kernels.query_gradient_tiling(head_size, dtype),
        "key_gradient_kernel": kernels.key_gradient_tiling(head_size, dtype),
    }
    found = {}
    for name, tiling in tilings.items():
        kernel = getattr(kernels, name)
        fixed: dict[str, Any] = {**constants, "tile_rows": tiling.rows, "tile_keys": tiling.keys, "shares": 1}
        signature: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        constexprs: dict[tuple[int, ...], Any] = {}
        for position, parameter in enumerate(inspect.signature(kernel.fn).parameters):
            if parameter in fixed:
                signature[parameter] = "constexpr"
                constexprs[(position,)] = fixed[parameter]
            elif parameter.endswith("_strides"):
                signature[parameter] = ("i32",) * 3
                for axis in range(3):
                    attributes[(position, axis)] = [["tt.divisibility", 16]]
            elif parameter in ("prefix_lengths", "key_lengths"):
                signature[parameter] = "*i64"
            elif parameter in ("lse", "delta"):
                signature[parameter] = "*fp32"
            elif parameter in ("scale", "scale_log2"):
                signature[parameter] = "fp32"
            elif parameter in (
                "length",
                "prefix_length",
                "siblings",
                "num_keys",
                "rows_per_batch",
                "rows_per_share",
            ):
                signature[parameter] = "i32"
            else:
                signature[parameter] = "*bf16"
                attributes[(position,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
        options = {
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
            "enable_fp_fusion": True,
        }
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        found[name] = {**_resources(compiled.asm["cubin"]), "shared": compiled.metadata.shared}
    return found


def _resources(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return {"registers": int(usage["REG"]), "spilled": int(usage["STACK"]) + int(usage["LOCAL"])}


if __name__ == "__main__":
    import triton

    found: dict[str, Any]
    if sys.argv[1] == "interpret":
        found = {name: interpret(name) for name in CASES}
    else:
        found = compile_for_hopper(int(sys.argv[2]))
    print(json.dumps({"triton": triton.__version__, "kernels": found}))
