# SPDX-License-Identifier: Apache-2.0
"""Attention over a shared prefix against its peers: forward, forward and backward, peak memory, error.

    python benchmarks/bench_sibling_prefix_attention.py [--quick] [--no-flex] [--no-write]

FLOP are counted as 4 N Hq L (P + L) D forward and 2.5 times that backward, whoever computes them. "joined" peers get keys
and values that are already concatenated, "+ cat" peers build them in the timed call, as a model without this operator does.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _bench import ceilings, interleaved, peak_bytes, print_table, write_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unirl.ops import SiblingKV, available_attention_backends, sibling_prefix_attention

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 28, 4, 128
SHAPES = [(16, 1026, 64), (16, 4098, 64), (16, 1026, 2400), (8, 4098, 9000)]
Call = Callable[[], object]


class Problem:
    """One group of N siblings: token-major tensors, as projections leave them."""

    def __init__(self, num_rows: int, length: int, prefix: int) -> None:
        self.shape = (num_rows, length, prefix)
        self.buffer = SiblingKV(
            num_groups=1,
            siblings=num_rows,
            prefix_length=prefix,
            own_length=length,
            num_key_heads=KEY_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.bfloat16,
            device="cuda",
        )
        self.buffer.storage.normal_()
        self.query = self._random(num_rows, length, QUERY_HEADS)
        self.grad_out = self._random(num_rows, length, QUERY_HEADS)
        buffer = self.buffer
        in_place = (buffer.key, buffer.value, buffer.prefix_key, buffer.prefix_value)
        self.separate = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in in_place)
        self.leaves = [tensor.detach().clone().requires_grad_() for tensor in (self.query, *self.separate)]
        self.joined = join(*self.separate)

    @staticmethod
    def _random(num_rows: int, length: int, heads: int) -> Tensor:
        values = torch.randn(num_rows, length, heads, HEAD_SIZE, device="cuda").bfloat16()
        return values.transpose(1, 2)

    def flop(self) -> int:
        num_rows, length, prefix = self.shape
        return 4 * num_rows * QUERY_HEADS * length * (prefix + length) * HEAD_SIZE


def join(key: Tensor, value: Tensor, prefix_key: Tensor, prefix_value: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the prefix in front of every sibling's own keys and values, token-major."""

    def one(prefix: Tensor, own: Tensor) -> Tensor:
        prefix = prefix.transpose(1, 2).expand(own.shape[0], -1, -1, -1)
        return torch.cat([prefix, own.transpose(1, 2)], 1).transpose(1, 2)

    return one(prefix_key, key), one(prefix_value, value)


def sdpa(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def forward_providers(problem: Problem, with_flex: bool) -> dict[str, Call]:
    query, separate, joined = problem.query, problem.separate, problem.joined
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    providers: dict[str, Call] = {
        "ours, packed buffer": lambda: problem.buffer.attend(query),
        "ours, five tensors": lambda: sibling_prefix_attention(query, *separate),
        "cuDNN, joined": lambda: sdpa(cudnn, query, *joined),
        "cuDNN + cat": lambda: sdpa(cudnn, query, *join(*separate)),
        "cuDNN, one call a sibling": lambda: [
            sdpa(
                cudnn, query[i : i + 1], *join(separate[0][i : i + 1], separate[1][i : i + 1], *separate[2:])
            )
            for i in range(problem.shape[0])
        ],
        "flash, joined": lambda: sdpa(flash, query, *joined),
    }
    if "triton" in available_attention_backends("cuda"):
        providers["ours, Triton"] = lambda: problem.buffer.attend(query, backend="triton")
    if importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_func

        tokens = [tensor.transpose(1, 2) for tensor in (query, *joined)]
        providers["FlashAttention-3, joined"] = lambda: flash_attn_func(*tokens)
        providers["FlashAttention-3 + cat"] = lambda: flash_attn_func(
            tokens[0], *(tensor.transpose(1, 2) for tensor in join(*separate))
        )
    if with_flex and (flex := flex_provider(problem)):
        providers["FlexAttention, joined"] = flex
    return providers


def flex_provider(problem: Problem) -> Call | None:
    """FlexAttention compiled, or ``None`` where it does not compile."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> object:
        return compiled(problem.query, *problem.joined, enable_gqa=True)

    try:
        call()
    except Exception as error:
        print(f"FlexAttention left out: {str(error).splitlines()[0]}")
        return None
    return call


def training_providers(problem: Problem) -> dict[str, Call]:
    separate, leaves = problem.leaves[1:], problem.leaves

    def gradients(attend: Callable[[], Tensor]) -> Call:
        return lambda: torch.autograd.grad(attend(), leaves, problem.grad_out)

    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    providers = {
        "ours": gradients(lambda: sibling_prefix_attention(*leaves)),
        "cuDNN + cat": gradients(lambda: sdpa(cudnn, leaves[0], *join(*separate))),
        "flash + cat": gradients(lambda: sdpa(flash, leaves[0], *join(*separate))),
    }
    for name in available_attention_backends("cuda"):
        if name not in ("reference", available_attention_backends("cuda")[0]):
            providers[f"ours, {name}"] = gradients(
                lambda name=name: sibling_prefix_attention(*leaves, backend=name)
            )
    return providers


def exact(problem: Problem, row: int, tokens: int = 64) -> Tensor:
    """The first ``tokens`` queries of one sibling in float64."""
    keys, values = (tensor[row].double() for tensor in problem.joined)
    ratio = QUERY_HEADS // KEY_HEADS
    logits = problem.query[row, :, :tokens].double() @ keys.repeat_interleave(ratio, 0).transpose(1, 2)
    return torch.softmax(logits * HEAD_SIZE**-0.5, -1) @ values.repeat_interleave(ratio, 0)


def error(problem: Problem, call: Call) -> float | None:
    """Relative error of a forward against float64 on part of the last row; ``None`` for peers that return lists."""
    result = call()
    result = result[0] if isinstance(result, tuple) else result
    if not isinstance(result, Tensor):
        return None
    if result.shape != problem.query.shape:
        result = result.transpose(1, 2)
    wanted = exact(problem, problem.shape[0] - 1)
    got = result[-1, :, : wanted.shape[1]].double()
    return float((got - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--no-flex", action="store_true", help="leave out FlexAttention, which compiles for minutes"
    )
    parser.add_argument("--no-write", action="store_true", help="do not append to benchmarks/results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention is measured on a GPU; none is here")
        return
    limits = ceilings()
    print(", ".join(f"{name} {value:.3g}" for name, value in limits.items()))
    rows, tables = [], {"forward": {}, "forward + backward": {}}
    rounds = 7 if arguments.quick else 15
    for shape in SHAPES:
        problem = Problem(*shape)
        for mode, providers, factor in (
            ("forward", forward_providers(problem, not arguments.no_flex), 1.0),
            ("forward + backward", training_providers(problem), 3.5),
        ):
            for provider, timing in interleaved(providers, rounds=rounds).items():
                tflops = factor * problem.flop() / timing.ms / 1e9
                tables[mode].setdefault(provider, []).append(f"{tflops:.0f}")
                rows.append(
                    {
                        "op": "sibling_prefix_attention",
                        "provider": provider,
                        "mode": mode,
                        "shape": {"N": shape[0], "L": shape[1], "P": shape[2]},
                        "heads": [QUERY_HEADS, KEY_HEADS],
                        "head_size": HEAD_SIZE,
                        "dtype": "bfloat16",
                        "tflops": round(tflops, 1),
                        "of_matmul": round(tflops / limits["matmul_tflops"], 3),
                        "peak_mb": round(peak_bytes(providers[provider]) / 1e6, 1),
                        "error": error(problem, providers[provider]) if mode == "forward" else None,
                        **{name: round(value, 4) for name, value in timing._asdict().items()},
                        **{name: round(value, 2) for name, value in limits.items()},
                    }
                )
        del problem, providers
        torch.cuda.empty_cache()
    for mode, table in tables.items():
        print(f"\n{mode}, TFLOP/s at (N, L, P)")
        print_table(["", *map(str, SHAPES)], [[name, *cells] for name, cells in table.items()])
    if not arguments.no_write:
        print(f"\nrows appended to {write_rows('sibling_prefix_attention', rows)}")


if __name__ == "__main__":
    main()
