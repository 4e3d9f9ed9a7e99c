# SPDX-License-Identifier: Apache-2.0
"""Attention over a shared prefix against its peers: forward, forward and backward, peak memory, error.

    python benchmarks/bench_sibling_prefix_attention.py [--slow-peers] [--shapes 0123] [--seconds 30] [--quick] [--results FOLDER]

FLOP are counted as 4 N Hq L (P + L) D forward and 2.5 times that backward, whoever computes them. How a peer gets its keys and
values: "joined", already concatenated; "+ cat", built in the timed call, as a model without this operator does; "+ own rows
copied", a buffer for every sibling that keeps the prefix, so that a step copies its own rows in; "one call a sibling", each with
its own concatenation. Ours: "packed buffer" (`SiblingKV`, nothing is moved) or "five tensors".

"error" is relative to float64: forward, 64 queries of the last row, all heads; with backward, the gradients of query, key and value
of the last row and its first key head. `--slow-peers` adds FlexAttention, which compiles for long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _bench import Bench, Call, device_of, parser
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unirl.ops import SiblingKV, available_attention_backends, sibling_prefix_attention

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 28, 4, 128
SHAPES = {
    "cuda": ([(16, 1026, 64), (16, 4098, 64), (16, 1026, 2400), (8, 4098, 9000)], torch.bfloat16),
    "cpu": ([(4, 258, 64), (4, 130, 300)], torch.float32),
}
QUICK = [(2, 18, 7)]
SDPA = {
    "cuda": {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION},
    "cpu": {"flash": SDPBackend.FLASH_ATTENTION},
}
CHECKED_QUERIES = 64
CHUNK_QUERIES = 512
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Problem:
    """One group of N siblings: token-major tensors, as projections leave them."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        num_rows, length, prefix = shape
        self.shape = shape
        self.buffer = SiblingKV(
            num_groups=1,
            siblings=num_rows,
            prefix_length=prefix,
            own_length=length,
            num_key_heads=KEY_HEADS,
            head_size=HEAD_SIZE,
            dtype=dtype,
            device=device,
        )
        buffer = self.buffer
        buffer.write_prefix(torch.randn_like(buffer.prefix_key), torch.randn_like(buffer.prefix_value))
        buffer.write_own(torch.randn_like(buffer.key), torch.randn_like(buffer.value))

        def random_queries() -> Tensor:
            values = torch.randn(num_rows, length, QUERY_HEADS, HEAD_SIZE, device=device)
            return values.to(dtype).transpose(1, 2)

        self.query, self.grad_out = random_queries(), random_queries()
        self.in_place = (buffer.key, buffer.value, buffer.prefix_key, buffer.prefix_value)
        self.separate = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in self.in_place)
        self.leaves = leaves(self.query, *self.separate)
        self.packed_leaves = leaves(self.query, *self.in_place)
        self.joined = join(*self.separate)

    def flop(self) -> int:
        num_rows, length, prefix = self.shape
        return 4 * num_rows * QUERY_HEADS * length * (prefix + length) * HEAD_SIZE


def leaves(*tensors: Tensor) -> list[Tensor]:
    """The same memory as the beginning of a graph."""
    return [tensor.detach().requires_grad_() for tensor in tensors]


def join(key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the prefix in front of every sibling's own keys and values, token-major."""

    def one(prefix: Tensor, own: Tensor) -> Tensor:
        prefix = prefix.transpose(1, 2).expand(own.shape[0], -1, -1, -1)
        return torch.cat([prefix, own.transpose(1, 2)], 1).transpose(1, 2)

    return one(prefix_key, key), one(prefix_value, value)


def sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def one_by_one(attend: Attend, query: Tensor, key: Tensor, value: Tensor, *prefix: Tensor) -> Tensor:
    """One call a sibling."""
    rows = range(query.shape[0])
    return torch.cat(
        [attend(query[i : i + 1], *join(key[i : i + 1], value[i : i + 1], *prefix)) for i in rows]
    )


def stock_peers(device: torch.device, slow: bool) -> tuple[dict[str, Attend], dict[str, Attend]]:
    """Attention over joined keys and values: (differentiable ones, those with a forward only)."""
    both: dict[str, Attend] = {name: partial(sdpa, backend) for name, backend in SDPA[device.type].items()}
    forward_only: dict[str, Attend] = {}
    if device.type == "cuda" and importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_func

        def flash_attention_3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            result = flash_attn_func(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
            return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

        forward_only["FlashAttention-3"] = flash_attention_3
    if slow:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        both["FlexAttention"] = partial(compiled, enable_gqa=True)
    return both, forward_only


def persistent(problem: Problem, attend: Attend) -> Call:
    """A joined buffer that lives on: a step copies its own rows behind the prefix."""
    key, value = (tensor.clone() for tensor in problem.joined)
    prefix = problem.shape[2]

    def call() -> Tensor:
        key[:, :, prefix:].copy_(problem.separate[0])
        value[:, :, prefix:].copy_(problem.separate[1])
        return attend(problem.query, key, value)

    return call


def forward_providers(problem: Problem, peers: dict[str, Attend], first: str) -> dict[str, Call]:
    """Ours with every kernel, and the peers; ``first`` also with one call a sibling."""
    query, separate = problem.query, problem.separate
    providers: dict[str, Call] = {
        "ours, packed buffer": lambda: problem.buffer.attend(query),
        "ours, five tensors": lambda: sibling_prefix_attention(query, *separate),
    }
    for name in other_kernels(query.device):
        providers[f"ours, {name}"] = lambda name=name: problem.buffer.attend(query, backend=name)
    for name, attend in peers.items():
        providers[f"{name}, joined"] = lambda attend=attend: attend(query, *problem.joined)
        providers[f"{name} + cat"] = lambda attend=attend: attend(query, *join(*separate))
    providers[f"{first} + own rows copied"] = persistent(problem, peers[first])
    providers[f"{first}, one call a sibling"] = lambda: one_by_one(peers[first], query, *separate)
    return providers


def training_providers(problem: Problem, peers: dict[str, Attend], first: str) -> dict[str, Call]:
    def gradients(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Call:
        return lambda: torch.autograd.grad(attend(*inputs), inputs, problem.grad_out)

    def with_cat(attend: Attend, query: Tensor, *separate: Tensor) -> Tensor:
        return attend(query, *join(*separate))

    providers = {
        "ours, packed buffer": gradients(sibling_prefix_attention, problem.packed_leaves),
        "ours, five tensors": gradients(sibling_prefix_attention, problem.leaves),
    }
    for name in other_kernels(problem.query.device):
        attend = partial(sibling_prefix_attention, backend=name)
        providers[f"ours, {name}"] = gradients(attend, problem.leaves)
    for name, attend in peers.items():
        providers[f"{name} + cat"] = gradients(partial(with_cat, attend), problem.leaves)
    providers[f"{first}, one call a sibling"] = gradients(partial(one_by_one, peers[first]), problem.leaves)
    return providers


def other_kernels(device: torch.device) -> list[str]:
    """Our kernels beside the preferred one, without the plain PyTorch evaluation."""
    return [name for name in available_attention_backends(device)[1:] if name != "reference"]


def exact_outputs(problem: Problem) -> Tensor:
    """The first queries of the last row in float64, ``[Hq, tokens, D]``."""
    keys, values = (tensor[-1].double() for tensor in problem.joined)
    ratio = QUERY_HEADS // KEY_HEADS
    query = problem.query[-1, :, :CHECKED_QUERIES].double()
    logits = query @ keys.repeat_interleave(ratio, 0).transpose(1, 2)
    return torch.softmax(logits * HEAD_SIZE**-0.5, -1) @ values.repeat_interleave(ratio, 0)


def exact_gradients(problem: Problem) -> list[Tensor]:
    """Of query, key and value of the last row, first key head, in float64; a chunk of queries at a time."""
    ratio = QUERY_HEADS // KEY_HEADS
    query, upstream = (tensor[-1, :ratio].double() for tensor in (problem.query, problem.grad_out))
    key, value = leaves(*(tensor[-1, 0].double() for tensor in problem.joined))
    totals = [torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)]
    for start in range(0, query.shape[1], CHUNK_QUERIES):
        part = slice(start, start + CHUNK_QUERIES)
        (queries,) = leaves(query[:, part])
        out = torch.softmax(queries @ key.T * HEAD_SIZE**-0.5, -1) @ value
        grads = torch.autograd.grad(out, (queries, key, value), upstream[:, part])
        totals[0][:, part] = grads[0]
        totals[1] += grads[1]
        totals[2] += grads[2]
    prefix = problem.shape[2]
    return [totals[0], totals[1][prefix:], totals[2][prefix:]]


def relative_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The worst of the tensors."""
    return max(
        float((left.double() - right).norm() / right.norm()) for left, right in zip(got, wanted, strict=True)
    )


def measure_shape(
    bench: Bench,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    peers: tuple[dict[str, Attend], dict[str, Attend]],
) -> None:
    if bench.slow_peers:
        torch._dynamo.reset()  # else it stops compiling after a few shapes
    problem = Problem(shape, dtype, bench.device)
    both, forward_only = peers
    first = next(iter(both))
    outputs, grads = exact_outputs(problem), exact_gradients(problem)
    ratio = QUERY_HEADS // KEY_HEADS

    def check_outputs(name: str, result: Any) -> dict[str, Any]:
        return {"error": relative_error([result[-1, :, : outputs.shape[1]]], [outputs])}

    def check_gradients(name: str, result: Sequence[Tensor]) -> dict[str, Any]:
        query, key, value = result[:3]
        return {"error": relative_error([query[-1, :ratio], key[-1, 0], value[-1, 0]], grads)}

    for mode, providers, check, factor in (
        ("forward", forward_providers(problem, both | forward_only, first), check_outputs, 1.0),
        ("forward + backward", training_providers(problem, both, first), check_gradients, 3.5),
    ):
        bench.measure(
            "sibling_prefix_attention",
            mode,
            dict(zip(("N", "L", "P"), shape, strict=True)),
            providers,
            check=check,
            flop=factor * problem.flop(),
            dtype=str(dtype).removeprefix("torch."),
            heads=[QUERY_HEADS, KEY_HEADS],
            head_size=HEAD_SIZE,
        )


def main(argv: Sequence[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--shapes", default="0123", help="some of the four shapes on a GPU: 0, 1, 2, 3")
    options = command.parse_args(argv)
    shapes, dtype = SHAPES[device_of(options)]
    shapes = QUICK if options.quick else [shape for i, shape in enumerate(shapes) if str(i) in options.shapes]
    with Bench("sibling_prefix_attention", options, num_cases=2 * len(shapes)) as bench:
        peers = stock_peers(bench.device, bench.slow_peers)
        for shape in shapes:
            measure_shape(bench, shape, dtype, peers)


if __name__ == "__main__":
    main()
