# SPDX-License-Identifier: Apache-2.0
"""pad_latents and trim_latents against their peers: forward, forward and backward.

    python benchmarks/bench_packing.py [--seconds 30] [--quick] [--results FOLDER]

Bytes are counted as what has to be read and written once: padding reads the rows and writes the padded tensor, trimming reads and
writes the rows. "error" is the number of bytes that differ from what slice assignment gives. "clone of as many bytes" is
what memory and allocator allow in the same round.

A list of many rows costs the host time to look at each and to allocate each result. On a GPU the forward calls are therefore
also captured in a CUDA graph and replayed ("kernel alone"): what a queue sees that is busy while the host prepares.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _bench import Bench, Call, device_of, parser
from torch import Tensor

from unirl.ops import pad_latents, trim_latents


class Case(NamedTuple):
    """N rows ``[K, seq, C]`` under a bound of S tokens; every row has one of ``counts`` tokens."""

    rows: int
    frames: int
    bound: int
    channels: int
    counts: tuple[int, ...]
    dtype: torch.dtype


CANVASES = (1024, 2304, 4096)
LARGE = (65536, 81920)  # tokens of a row of 42 or 52 MB
DIGITS = Case(120, 5, 36, 4, (16, 36, 24), torch.float32)
CASES = {
    "cuda": [
        Case(160, 5, 4096, 64, CANVASES, torch.bfloat16),
        Case(160, 5, 4096, 64, CANVASES[-1:], torch.bfloat16),
        Case(8, 5, LARGE[-1], 64, LARGE, torch.bfloat16),
        DIGITS,
    ],
    "cpu": [
        Case(16, 5, 4096, 64, CANVASES, torch.bfloat16),
        Case(16, 5, 4096, 64, CANVASES[-1:], torch.bfloat16),
        DIGITS,
    ],
}
QUICK = [Case(6, 2, 40, 8, (10, 25, 40), torch.float32)]


class Problem:
    """Rows, their padded form and gradients of both, all random."""

    def __init__(self, case: Case, device: torch.device) -> None:
        draw = random.Random(0)
        self.case = case
        self.lengths = [draw.choice(case.counts) for _ in range(case.rows)]
        shape = (case.rows, case.frames, case.bound, case.channels)

        def values(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.float32).to(case.dtype)

        self.rows = [values(case.frames, n, case.channels).requires_grad_() for n in self.lengths]
        self.row_grads = [values(case.frames, n, case.channels) for n in self.lengths]
        self.padded = values(*shape).requires_grad_()
        self.padded_grad = values(*shape)
        bounds = [0]
        for length in self.lengths:
            bounds += [bounds[-1] + (k + 1) * length for k in range(case.frames)]
        self.offsets = torch.tensor(bounds, device=device)
        self.joined = self.join(self.rows).detach().requires_grad_()
        self.packed_bytes = sum(row.nbytes for row in self.rows)
        self.padded_bytes = self.padded.nbytes

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """The tokens of all frames of all rows, one after the other."""
        return torch.cat([row.reshape(-1, self.case.channels) for row in rows])

    def expected_padded(self, rows: Sequence[Tensor]) -> Tensor:
        result = torch.zeros_like(self.padded)
        for index, (row, length) in enumerate(zip(rows, self.lengths, strict=True)):
            result[index, :, :length] = row.detach()
        return result

    def expected_rows(self, padded: Tensor) -> list[Tensor]:
        return [row[:, :length] for row, length in zip(padded, self.lengths, strict=True)]


def wrong_bytes(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """Bytes that differ; a wrong shape or number of tensors is an error."""
    pairs = zip(got, wanted, strict=True)
    return sum(
        int((_bytes(left.reshape(right.shape)) != _bytes(right)).sum())
        for left, right in ((a.detach(), b.detach()) for a, b in pairs)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def pad_peers(problem: Problem) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """(padding, what it is differentiated by) of every peer."""
    case, rows = problem.case, problem.rows
    shape = problem.padded.shape

    def jagged(values: Tensor) -> Tensor:
        padded = torch.ops.aten._jagged_to_padded_dense_forward(values, [problem.offsets], [case.bound], 0.0)
        return padded.view(shape)

    def nested() -> Tensor:
        return torch.nested.as_nested_tensor(rows).to_padded_tensor(0.0, shape)

    return {
        "ours": (lambda: pad_latents(rows, case.bound), rows),
        "F.pad + stack": (
            lambda: torch.stack([F.pad(row, (0, 0, 0, case.bound - row.shape[1])) for row in rows]),
            rows,
        ),
        "torch.nested": (nested, rows),
        "cat + _jagged_to_padded": (lambda: jagged(problem.join(rows)), rows),
        "_jagged_to_padded, joined": (lambda: jagged(problem.joined), [problem.joined]),
    }


def trim_peers(problem: Problem) -> dict[str, tuple[Callable[[], Sequence[Tensor]], list[Tensor]]]:
    """As :func:`pad_peers`; the jagged peer leaves one joined tensor."""
    case, padded, lengths = problem.case, problem.padded, problem.lengths
    total = problem.joined.shape[0]

    def jagged() -> Sequence[Tensor]:
        flat = padded.view(-1, case.bound, case.channels)
        joined = torch.ops.aten._padded_dense_to_jagged_forward(flat, [problem.offsets], total)
        parts = joined.split([case.frames * length for length in lengths])
        return [part.view(case.frames, -1, case.channels) for part in parts]

    return {
        "ours": (lambda: trim_latents(padded, lengths), [padded]),
        "slices + clone": (
            lambda: [
                row[:, :n].clone(memory_format=torch.contiguous_format)
                for row, n in zip(padded, lengths, strict=True)
            ],
            [padded],
        ),
        "_padded_to_jagged + split": (jagged, [padded]),
    }


def clone_of(num_bytes: int, device: torch.device) -> Call:
    """A copy into a new tensor that reads and writes ``num_bytes`` together."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    return source.clone


def replayed(call: Call) -> Call:
    """The replay of a CUDA graph that ``call`` is captured in when this is called first."""

    @functools.cache
    def captured() -> tuple[torch.cuda.CUDAGraph, Any]:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        return graph, result

    def replay() -> Any:
        graph, result = captured()
        graph.replay()
        return result

    return replay


def gradients(forward: Callable[[], Any], leaves: list[Tensor], upstream: Any) -> Call:
    return lambda: torch.autograd.grad(forward(), leaves, upstream)


def measure_case(bench: Bench, case: Case) -> None:
    problem = Problem(case, bench.device)
    columns = {"dtype": str(case.dtype).removeprefix("torch.")}
    counts = "/".join(map(str, case.counts))
    shape = {"N": case.rows, "K": case.frames, "S": case.bound, "C": case.channels, "tokens": counts}
    one_way = problem.packed_bytes + problem.padded_bytes
    both = one_way + 2 * problem.packed_bytes
    for op, peers, upstream, forward_bytes, wanted, wanted_grads in (
        (
            "pad_latents",
            pad_peers(problem),
            problem.padded_grad,
            one_way,
            [problem.expected_padded(problem.rows)],
            problem.expected_rows(problem.padded_grad),
        ),
        (
            "trim_latents",
            trim_peers(problem),
            problem.row_grads,
            2 * problem.packed_bytes,
            problem.expected_rows(problem.padded),
            [problem.expected_padded(problem.row_grads)],
        ),
    ):
        for mode, num_bytes, expected in (
            ("forward", forward_bytes, wanted),
            ("forward + backward", both, wanted_grads),
        ):
            providers: dict[str, Call] = {"clone of as many bytes": clone_of(num_bytes, bench.device)}
            for name, (forward, leaves) in peers.items():
                backward = mode != "forward"
                providers[name] = gradients(forward, leaves, upstream) if backward else no_grad(forward)
            if mode == "forward" and bench.device.type == "cuda":
                for name in ("clone of as many bytes", "ours"):
                    providers[f"{name}, kernel alone (CUDA graph)"] = replayed(providers[name])

            def check(name: str, result: Any, expected: Sequence[Tensor] = expected) -> dict[str, Any]:
                if name.startswith("clone"):
                    return {}
                got = [result] if isinstance(result, Tensor) else list(result)
                if name.endswith("joined") and len(expected) > 1:
                    return {"error": wrong_bytes(got, [problem.join(expected)])}
                return {"error": wrong_bytes(got, expected)}

            bench.measure(op, mode, shape, providers, check=check, moved_bytes=num_bytes, **columns)


def no_grad(forward: Callable[[], Any]) -> Call:
    def call() -> Any:
        with torch.no_grad():
            return forward()

    return call


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
    cases = QUICK if options.quick else CASES[device_of(options)]
    with Bench("packing", options, num_cases=4 * len(cases)) as bench:
        for case in cases:
            measure_case(bench, case)


if __name__ == "__main__":
    main()
