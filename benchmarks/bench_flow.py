# SPDX-License-Identifier: Apache-2.0
"""keyed_normal, flow_step and flow_log_prob against eager and compiled PyTorch.

    python benchmarks/bench_flow.py [--slow-peers] [--seconds 30] [--quick] [--results FOLDER]

The eager step is what trainers write by hand: float32 mean, `torch.randn_like`, rounding to the trajectory's dtype, log-density of
the rounded value. Its noise is tied to the batch; "a generator a row" is the plain way to tie it to the row. Bytes are what has to
be read and written once: noise 1 write; step 2 reads, 1 write; log-prob 3 reads; with its backward 6 reads, 1 write.

"error": noise, the largest difference from Box-Muller of the same Philox words in float64; log-prob, the largest difference from
float64; with backward, the relative error of the gradient, whose dtype is the velocity's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from _bench import Bench, Call, device_of, parser
from torch import Tensor

from unirl.ops import flow_log_prob, flow_step, keyed_normal

ETA, SEED, STEP = 0.7, 20, 3
SHAPES = {
    "cuda": ([(16, 4096, 64), (256, 4096, 64)], torch.bfloat16),
    "cpu": ([(8, 1024, 64), (32, 2304, 64)], torch.float32),
}
QUICK = [(3, 50, 16)]
CHECKED_ELEMENTS = 4096


def mean_and_scale(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    """Flow-GRPO's transition in the dtype of its arguments; sigma < 1."""
    sigma, sigma_next = sigma.view(-1, 1, 1), sigma_next.view(-1, 1, 1)
    dt = sigma_next - sigma
    std = ETA * torch.sqrt(sigma / (1 - sigma))
    mean = x * (1 + std**2 / (2 * sigma) * dt) + v * (1 + std**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, std * torch.sqrt(-dt)


def gaussian_log_prob(value: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    density = -((value - mean) ** 2) / (2 * scale**2) - torch.log(scale) - 0.5 * math.log(2 * math.pi)
    return density.mean(dim=(1, 2))


def eager_step(x: Tensor, v: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
    mean, scale = mean_and_scale(x.float(), v.float(), sigma, sigma_next)
    following = (mean + scale * torch.randn_like(mean)).to(x.dtype)
    return following, gaussian_log_prob(following.float(), mean, scale)


def eager_log_prob(x: Tensor, v: Tensor, following: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    mean, scale = mean_and_scale(x.float(), v.float(), sigma, sigma_next)
    return gaussian_log_prob(following.float(), mean, scale)


def exact_log_prob(x: Tensor, v: Tensor, following: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """In float64."""
    mean, scale = mean_and_scale(x.double(), v.double(), sigma.double(), sigma_next.double())
    return gaussian_log_prob(following.double(), mean, scale)


def exact_noise(row_key: int, size: int) -> np.ndarray:
    """The first ``size`` normals of a row in float64: Box-Muller of Philox4x32-10, stream 0."""
    mask = np.uint64(0xFFFFFFFF)
    low32 = np.uint64(32)

    def mix(word: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            word = ((word ^ (word >> shift)) * factor) & (2**64 - 1)
        return word ^ (word >> 31)

    key = mix(mix(SEED) ^ (row_key & (2**64 - 1)))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    blocks = -(-size // 4)
    c0 = np.arange(blocks, dtype=np.uint64)
    c1, c2, c3 = np.zeros_like(c0), np.full_like(c0, STEP), np.zeros_like(c0)
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> low32) ^ c1 ^ np.uint64(k0),
            p1 & mask,
            (p0 >> low32) ^ c3 ^ np.uint64(k1),
            p0 & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    normals = []
    for radius_word, angle_word in ((c0, c1), (c2, c3)):
        radius = np.sqrt(-2 * np.log((radius_word.astype(np.float64) + 0.5) / 2**32))
        # The top two bits are the quadrant, the rest the angle inside it, centred.
        quadrant = (angle_word >> np.uint64(30)).astype(np.float64)
        inside = (angle_word & np.uint64(0x3FFFFFFF)).astype(np.float64) - 2**29 + 0.5
        angle = (quadrant + inside / 2**30) * (math.pi / 2)
        normals += [radius * np.cos(angle), radius * np.sin(angle)]
    return np.stack(normals, -1).reshape(-1)[:size]


def measure_noise(bench: Bench, shape: tuple[int, int, int]) -> None:
    device = bench.device
    keys = torch.randint(-(2**62), 2**62, (shape[0],))
    on_device, as_ints = keys.to(device), [int(key) % 2**63 for key in keys]

    def a_generator_a_row() -> Tensor:
        return torch.stack(
            [
                torch.randn(shape[1:], device=device, generator=torch.Generator(device).manual_seed(key))
                for key in as_ints
            ]
        )

    def check(name: str, result: Tensor) -> dict[str, Any]:
        if name != "ours":
            return {}
        errors = []
        for row in (0, shape[0] - 1):
            got = result[row].flatten()[:CHECKED_ELEMENTS].double().cpu().numpy()
            errors.append(np.abs(got - exact_noise(int(keys[row]), len(got))).max())
        return {"error": float(max(errors))}

    providers: dict[str, Call] = {
        "ours": lambda: keyed_normal(shape, seed=SEED, row_keys=on_device, step=STEP),
        "torch.randn (no keys)": lambda: torch.randn(shape, device=device),
        "a generator a row": a_generator_a_row,
    }
    moved = 4 * math.prod(shape)
    bench.measure(
        "keyed_normal", "forward", named(shape), providers, check=check, moved_bytes=moved, dtype="float32"
    )


def named(shape: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("N", "seq", "C"), shape, strict=True))


class Problem:
    """Random rows in the middle of a schedule."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.x, self.v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        self.sigma = torch.rand(shape[0], device=device) * 0.4 + 0.5
        self.sigma_next = self.sigma - 0.1
        self.keys = torch.randint(-(2**62), 2**62, (shape[0],), device=device)
        self.following = eager_step(self.x, self.v, self.sigma, self.sigma_next)[0]
        self.grad = torch.randn(shape[0], device=device)
        self.leaf = self.v.clone().requires_grad_()

    def ends(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The first and the last row of each: float64 takes memory, and rows do not depend on others."""
        return tuple(tensor[[0, -1]] for tensor in tensors)


def measure_step(bench: Bench, problem: Problem, shape: tuple[int, int, int]) -> None:
    x, v, sigma, sigma_next = inputs = (problem.x, problem.v, problem.sigma, problem.sigma_next)

    def ours() -> tuple[Tensor, Tensor]:
        return flow_step(
            *inputs,
            eta=ETA,
            rule="flow",
            seed=SEED,
            row_keys=problem.keys,
            step=STEP,
            trajectory_dtype=x.dtype,
        )

    def check(name: str, result: tuple[Tensor, Tensor]) -> dict[str, Any]:
        ends = problem.ends(x, v, result[0], sigma, sigma_next)
        difference = exact_log_prob(*ends) - problem.ends(result[1])[0].double()
        return {"error": float(difference.abs().max())}

    providers: dict[str, Call] = {"ours": ours, "eager": lambda: eager_step(*inputs)}
    if bench.slow_peers:
        compiled = torch.compile(eager_step, dynamic=False)
        providers["eager, compiled"] = lambda: compiled(*inputs)
    bench.measure(
        "flow_step",
        "forward",
        named(shape),
        providers,
        check=check,
        moved_bytes=3 * x.nbytes,
        dtype=str(x.dtype).removeprefix("torch."),
    )


def measure_log_prob(bench: Bench, problem: Problem, shape: tuple[int, int, int]) -> None:
    x, sigma, sigma_next, following = problem.x, problem.sigma, problem.sigma_next, problem.following
    columns = {"dtype": str(x.dtype).removeprefix("torch.")}
    ends = problem.ends(x, problem.v, following, sigma, sigma_next)
    leaf = ends[1].double().requires_grad_()
    wanted = exact_log_prob(ends[0], leaf, *ends[2:])
    (wanted_grad,) = torch.autograd.grad(wanted, leaf, problem.ends(problem.grad)[0].double())

    peers: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": lambda v: flow_log_prob(x, v, following, sigma, sigma_next, eta=ETA, rule="flow"),
        "eager": lambda v: eager_log_prob(x, v, following, sigma, sigma_next),
    }
    if bench.slow_peers:
        compiled = torch.compile(eager_log_prob, dynamic=False)
        peers["eager, compiled"] = lambda v: compiled(x, v, following, sigma, sigma_next)

    def check(name: str, result: Tensor) -> dict[str, Any]:
        return {"error": float((result[[0, -1]].double() - wanted.detach()).abs().max())}

    def check_gradient(name: str, result: tuple[Tensor]) -> dict[str, Any]:
        difference = result[0][[0, -1]].double() - wanted_grad
        return {"error": float(difference.norm() / wanted_grad.norm())}

    forward: dict[str, Call] = {name: lambda peer=peer: peer(problem.v) for name, peer in peers.items()}
    both: dict[str, Call] = {
        name: lambda peer=peer: torch.autograd.grad(peer(problem.leaf), problem.leaf, problem.grad)
        for name, peer in peers.items()
    }
    for mode, providers, judge, passes in (
        ("forward", forward, check, 3),
        ("forward + backward", both, check_gradient, 7),
    ):
        bench.measure(
            "flow_log_prob",
            mode,
            named(shape),
            providers,
            check=judge,
            moved_bytes=passes * x.nbytes,
            **columns,
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    shapes, dtype = SHAPES[device_of(options)]
    if options.quick:
        shapes = QUICK
    with Bench("flow", options, num_cases=4 * len(shapes)) as bench:
        for shape in shapes:
            measure_noise(bench, shape)
            problem = Problem(shape, dtype, bench.device)
            measure_step(bench, problem, shape)
            measure_log_prob(bench, problem, shape)


if __name__ == "__main__":
    main()
