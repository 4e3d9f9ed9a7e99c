# SPDX-License-Identifier: Apache-2.0
"""guided_velocity with each renormalisation against eager and compiled PyTorch: forward, forward and backward.

    python benchmarks/bench_guidance.py [--slow-peers] [--seconds 30] [--quick] [--results FOLDER]

Bytes are what has to be read and written once: forward 3 reads, 1 write; with its backward 7 reads, 4 writes. "eager" computes in
float32, "eager, as stored" in the dtype of the velocities, as inference code does. "error" is the relative error against float64,
of the result or of the three gradients together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from _bench import Bench, Call, device_of, parser
from torch import Tensor

from unirl.ops import guided_velocity

TEXT_SCALE, IMAGE_SCALE = 4.0, 1.5
RENORMS = ("global", "channel", "text_channel")
SHAPES = {
    "cuda": ([(16, 4096, 64), (128, 4096, 64)], torch.bfloat16),
    "cpu": ([(8, 1024, 64), (32, 2304, 64)], torch.float32),
}
QUICK = [(3, 50, 16)]


def scaled(plain: Tensor, guided: Tensor, renorm: str) -> Tensor:
    """``guided``, made as long as ``plain`` where it is longer: a factor a row, or one a token."""
    axes = (-2, -1) if renorm == "global" else -1
    longest = torch.linalg.vector_norm(plain, dim=axes, keepdim=True)
    length = torch.linalg.vector_norm(guided, dim=axes, keepdim=True)
    return guided * (longest / (length + 1e-8)).clamp(0.0, 1.0)


def guidance(cond: Tensor, text: Tensor, image: Tensor, renorm: str) -> Tensor:
    """In the dtype of its arguments."""
    guided = text + TEXT_SCALE * (cond - text)
    if renorm == "text_channel":
        guided = scaled(cond, guided, renorm)
    guided = image + IMAGE_SCALE * (guided - image)
    return guided if renorm == "text_channel" else scaled(cond, guided, renorm)


def eager(cond: Tensor, text: Tensor, image: Tensor, renorm: str) -> Tensor:
    return guidance(cond.float(), text.float(), image.float(), renorm).to(cond.dtype)


def relative_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Of the first and the last row of all tensors together."""
    pairs = list(zip(got, wanted, strict=True))
    wrong = sum(float((left[[0, -1]].double() - right).square().sum()) for left, right in pairs)
    return (wrong / sum(float(right.square().sum()) for _, right in pairs)) ** 0.5


def measure_renorm(bench: Bench, branches: Sequence[Tensor], upstream: Tensor, renorm: str) -> None:
    leaves = [branch.detach().requires_grad_() for branch in branches]
    ends = [branch.detach()[[0, -1]].double().requires_grad_() for branch in branches]
    wanted = guidance(*ends, renorm)
    wanted_grads = torch.autograd.grad(wanted, ends, upstream[[0, -1]].double())
    peers: dict[str, Callable[..., Tensor]] = {
        "ours": lambda c, t, i: guided_velocity(c, t, i, TEXT_SCALE, IMAGE_SCALE, renorm=renorm),
        "eager": lambda c, t, i: eager(c, t, i, renorm),
    }
    if branches[0].dtype != torch.float32:
        peers["eager, as stored"] = lambda c, t, i: guidance(c, t, i, renorm)
    if bench.slow_peers:
        torch._dynamo.reset()  # else it stops compiling after a few cases
        compiled = torch.compile(eager, dynamic=False)
        peers["eager, compiled"] = lambda c, t, i: compiled(c, t, i, renorm)
    forward: dict[str, Call] = {name: lambda peer=peer: peer(*branches) for name, peer in peers.items()}
    both: dict[str, Call] = {
        name: lambda peer=peer: torch.autograd.grad(peer(*leaves), leaves, upstream)
        for name, peer in peers.items()
    }
    shape = dict(zip(("N", "seq", "C"), branches[0].shape, strict=True))
    for mode, providers, expected, passes in (
        ("forward", forward, [wanted.detach()], 4),
        ("forward + backward", both, wanted_grads, 11),
    ):

        def check(name: str, result: Any, expected: Sequence[Tensor] = expected) -> dict[str, Any]:
            return {"error": relative_error([result] if isinstance(result, Tensor) else result, expected)}

        bench.measure(
            "guided_velocity",
            mode,
            shape,
            providers,
            check=check,
            moved_bytes=passes * upstream.nbytes,
            renorm=renorm,
            dtype=str(upstream.dtype).removeprefix("torch."),
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    shapes, dtype = SHAPES[device_of(options)]
    if options.quick:
        shapes = QUICK
    with Bench("guidance", options, num_cases=2 * len(RENORMS) * len(shapes)) as bench:
        for shape in shapes:
            *branches, upstream = (torch.randn(shape, device=bench.device).to(dtype) for _ in range(4))
            for renorm in RENORMS:
                measure_renorm(bench, branches, upstream, renorm)


if __name__ == "__main__":
    main()
