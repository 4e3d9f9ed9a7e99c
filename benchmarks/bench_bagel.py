# SPDX-License-Identifier: Apache-2.0
"""BAGEL at its public 7B dimensions with random weights: one denoise step, and the replay that trains its adapter.

    python benchmarks/bench_bagel.py [--layers 28] [--shapes 0,1,2] [--modes denoise,replay] [--slow-peers] [--profile] [--quick]

Modes. "denoise": the conditional velocity of N siblings over one prefix, base weights. "adapted": the same with a LoRA of rank 64
on the generation expert, not merged. "replay": what a trainer does with N rows of one trained step: prefix, velocity, log-prob,
and the gradient of its mean by the adapter, layers recomputed in the backward pass. "kept": the same without recomputing.

Peers. "ours" is the model as it is. "plain" is a decoder of stock PyTorch on the same weights (`_plain_decoder.py`): fused norms,
every sibling's K/V behind a copy of the prefix, SDPA (cuDNN on a GPU), adapters in the dtype of the activations. `--slow-peers`
adds both compiled a layer at a time.

FLOP, for N rows of T = L + 2 tokens (latents and two markers), P of prefix, n layers of width d, KV width k, MLP width f, rank r:

    linear     2 N T n (2 d^2 + 2 d k + 3 d f)
    attention  4 N Hq D T (P + T) n
    adapter    2 N L n r (sum of in + out of a layer's adapted ones)
    ends       latents in and out of the model's width, the time's embedding
    prefix     the same linear layers of P tokens, half of 4 Hq D P^2; of the last layer keys and values only

A step needs linear + attention + adapter + ends. A replay needs prefix + 2 linear + 3.5 attention + 3 adapter: frozen weights have
no gradient, so backward a linear layer is one product, not two, and none for the first layer's queries, keys and values; attention
counts 2.5 times backward, as in its own benchmark. "recomputing" counts the layers' forward once more: prefix + 3 linear +
4.5 attention + 4 adapter, near three times a step, also where a peer leaves a part of it out.

"error" is relative: of a step against the plain decoder in float32 on the first and the last row, of a replay's gradients against
the plain peer's, all tensors together. `--profile` prints the kernels of each mode's first shape.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from _bench import Bench, Call, Check, device_of, parser
from _models import random_stage
from _plain_decoder import plain_decoder, plain_layer, replaced
from _profile import TOP, kernels_of, print_profile
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from unirl.config import LoraConfig, ModelConfig
from unirl.models.bagel import Bagel, BagelConfig, BagelStage
from unirl.models.bagel.batching import plan_batches
from unirl.models.bagel.context import build_contexts
from unirl.train.lora import adapter_parameters, lora_layers
from unirl.train.trainable import prepare
from unirl.types import LatentSegment, NoiseRecipe, Part, SamplingParams, frames_to_keep

MODES = ("denoise", "adapted", "replay", "kept")
STEPS, TRAINED_STEP = 14, 3


class Shape(NamedTuple):
    """One group: siblings, latent tokens of a square canvas, tokens of its prompt with bos and eos."""

    siblings: int
    tokens: int
    prefix: int


SHAPES = {
    "cuda": (
        "bagel-7b-mot",
        torch.bfloat16,
        [Shape(16, 1024, 64), Shape(4, 4096, 64), Shape(16, 1024, 2400)],
    ),
    "cpu": ("bagel-digits", torch.float32, [Shape(16, 64, 64), Shape(4, 64, 16), Shape(16, 64, 600)]),
}
QUICK = [Shape(3, 16, 7)]


class Flop(NamedTuple):
    """Of one pass forward, by part; ``first`` is what the gradient of the first layer's input would take."""

    linear: float
    attention: float
    adapter: float
    end: float
    time: float
    prefix: float
    first: float

    @property
    def step(self) -> float:
        """A velocity."""
        return self.linear + self.attention + self.adapter + 2 * self.end + self.time

    def replay(self, forwards: int = 1) -> float:
        """A velocity and the gradient by the adapter, the layers computed forward so many times."""
        layers = (forwards + 1) * self.linear - self.first
        layers += (forwards + 2.5) * self.attention + (forwards + 2) * self.adapter
        return self.prefix + layers + 3 * self.end + self.time


def flop_of(config: BagelConfig, shape: Shape, factors: int = 0) -> Flop:
    """Counted as the module says; ``factors`` are the entries of one layer's adapter."""
    language = config.language
    rows, latents, prefix = shape
    width, layers = language.hidden_size, language.num_hidden_layers
    keys_values = 2 * width * language.num_key_value_heads * language.head_dim
    entries = 2 * width**2 + keys_values + 3 * width * language.intermediate_size
    tokens = rows * (latents + 2)
    causal = 2.0 * width * prefix * (prefix + 1) * (layers - 1)
    return Flop(
        linear=2.0 * tokens * layers * entries,
        attention=4.0 * tokens * layers * width * (prefix + latents + 2),
        adapter=2.0 * rows * latents * layers * factors,
        end=2.0 * rows * latents * config.latent_channels * width,
        time=2.0 * rows * (256 + width) * width,
        prefix=2.0 * prefix * ((layers - 1) * entries + keys_values) + causal,
        first=2.0 * tokens * (width**2 + keys_values),
    )


class Problem:
    """Rows of one shape: what a denoise step and what a replay is given."""

    def __init__(self, stage: BagelStage, shape: Shape) -> None:
        self.stage, self.shape = stage, shape
        self.model = stage.model
        device = self.model.device
        side = math.isqrt(shape.tokens)
        if side**2 != shape.tokens:
            raise SystemExit(f"{shape.tokens} tokens are no square canvas")
        canvas = side * stage.pixel_stride
        bfloat16 = self.model.dtype is torch.bfloat16
        params = SamplingParams(
            height=canvas,
            width=canvas,
            num_inference_steps=STEPS,
            eta=0.7,
            rule="flow",
            noise=NoiseRecipe(0),
            trajectory_dtype="bfloat16" if bfloat16 else "float32",
        )
        prompts = Part(ids=("r0.p0",), prompts=("x" * (shape.prefix - 2),), metadata=({},))
        rows = prompts.fork(shape.siblings, params)
        kept = frames_to_keep([TRAINED_STEP], STEPS)
        frames = torch.randn(
            shape.siblings, len(kept), shape.tokens, self.model.config.latent_channels, device=device
        ).to(self.model.dtype)
        segment = LatentSegment.pack(
            list(frames.cpu()),
            frame_steps=torch.tensor([kept] * shape.siblings),
            sde_steps=torch.tensor([[TRAINED_STEP]] * shape.siblings),
            log_probs=torch.zeros(shape.siblings, 1),
            sigmas=stage.sigmas(params, params.canvas).expand(shape.siblings, -1),
            pad_to=shape.tokens,
        )
        self.rows = rows.replace(segment=segment)
        (batch,) = plan_batches(self.rows, self.model, stage.codec, stage.tokenizer)
        self.latents, self.positions = frames[:, 0], batch.positions
        self.times = torch.linspace(0.1, 0.9, shape.siblings, device=device)
        with torch.no_grad():
            self.contexts = build_contexts(self.model, batch.requests, ("gen",))

    @torch.no_grad()
    def step(self, *, rows: Sequence[int] | None = None) -> Tensor:
        """Velocity ``[N, L, C]``, or of some rows."""
        latents, times = self.latents, self.times
        if rows is not None:
            latents, times = latents[list(rows)], times[list(rows)]
        return self.model.velocity(
            latents, times, self.contexts, siblings=len(latents), latent_position_ids=self.positions
        )

    def replay(self) -> tuple[Tensor, ...]:
        """Gradients of the mean log-prob by the adapter's factors."""
        total = self.stage.replay(self.rows).log_probs.mean()
        return torch.autograd.grad(total, list(adapter_parameters(self.model).values()))


Way = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which the model runs as one of the peers."""


def ways(model: Bagel, slow: bool) -> dict[str, Way]:
    """The peers and ours, by name; the first is what gradients are compared with."""
    found: dict[str, Way] = {"plain": with_cudnn(plain_decoder(model)), "ours": contextlib.nullcontext}
    if slow:
        torch._dynamo.reset()  # else it stops compiling after a few shapes
        found["ours, compiled layers"] = compiled_layers(model)
        plain = torch.compile(plain_layer, dynamic=False)
        found["plain, compiled layers"] = with_cudnn(plain_decoder(model, plain))
    return found


def with_cudnn(way: Way) -> Way:
    """SDPA tries cuDNN first."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with sdpa_kernel(order, set_priority=True), way():
            yield

    return entered


def compiled_layers(model: Bagel) -> Way:
    """All layers through one compiled function."""
    decoder = model.language_model.model
    compiled = torch.compile(lambda layer, *arguments: layer(*arguments), dynamic=False)

    def run(*arguments: Any) -> Any:
        if decoder.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(compiled, *arguments, use_reentrant=False)
        return compiled(*arguments)

    return lambda: replaced(decoder, _run=run)


def running(way: Way, call: Call) -> Call:
    def run() -> Any:
        with way():
            return call()

    return run


def relative_error(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Of all tensors together."""
    pairs = list(zip(got, wanted, strict=True))
    wrong = sum(float((left.double() - right.double()).square().sum()) for left, right in pairs)
    return math.sqrt(wrong / sum(float(right.double().square().sum()) for _, right in pairs))


class Benchmark:
    """The model, and what is measured of it in each mode."""

    def __init__(self, options: argparse.Namespace, bench: Bench, name: str, dtype: torch.dtype) -> None:
        self.options, self.bench = options, bench
        self.stage = random_stage(name, str(bench.device), options.layers, dtype)
        self.profiled: set[str] = set()

    def measure(self, mode: str, shape: Shape) -> None:
        model = self.stage.model
        if mode != "denoise" and not lora_layers(model):
            adapt(model)
        model.gradient_checkpointing = mode == "replay"
        problem = Problem(self.stage, shape)
        trains = mode in ("replay", "kept")
        call = problem.replay if trains else problem.step
        providers = {name: running(way, call) for name, way in ways(model, self.bench.slow_peers).items()}
        check = gradient_check() if trains else self.step_check(problem)
        flop = flop_of(model.config, shape, adapter_entries(model))
        needed, recomputing = flop.step, flop.step
        if trains:
            needed, recomputing = flop.replay(), flop.replay(forwards=2 if mode == "replay" else 1)
        first = len(self.bench.rows)
        self.bench.measure(
            "bagel",
            mode,
            dict(zip(("N", "L", "P"), shape, strict=True)),
            providers,
            check=check,
            flop=needed,
            dtype=str(model.dtype).removeprefix("torch."),
            layers=model.config.language.num_hidden_layers,
            tflop=needed / 1e12,
            tflop_recomputing=recomputing / 1e12,
        )
        for row in self.bench.rows[first:]:
            if mode == "replay" and "of_matmul" in row:
                row["recomputing_of_matmul"] = row["of_matmul"] * recomputing / needed
                row["note"] = f"recomputing {row['recomputing_of_matmul']:.1%}"
            outcome = (
                row.get("missing") or f"{row['ms']:.1f} ms, {row['of_matmul']:.1%} {row.get('note', '')}"
            )
            print(f"{mode} {tuple(shape)}, {row['provider']}: {outcome}", flush=True)
        if self.options.profile and mode not in self.profiled:
            self.profiled.add(mode)
            title = f"{mode}, {shape.siblings} x {shape.tokens}, prefix {shape.prefix}"
            for name, top in (("ours", TOP), ("plain", 0)):
                print_profile(f"{title}, {name}", *kernels_of(providers[name], self.bench.device), top)

    def step_check(self, problem: Problem) -> Check:
        ends = [0, problem.shape.siblings - 1]
        with plain_decoder(problem.model, dtype=torch.float32)():
            wanted = problem.step(rows=ends)
        return lambda name, result: {"error": relative_error([result[ends]], [wanted])}


def gradient_check() -> Check:
    """Compares with the first gradients that it is given."""
    wanted: list[Tensor] = []

    def check(name: str, result: Sequence[Tensor]) -> dict[str, Any]:
        if not wanted:
            wanted.extend(result)
            return {}
        return {"error": relative_error(result, wanted)}

    return check


def adapt(model: Bagel) -> None:
    """As a trainer prepares a model, then B, which begins at 0, as if it had been trained."""
    config = ModelConfig(lora=LoraConfig(), gradient_checkpointing=True)
    prepare(model, config, seed=0)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.01)


def adapter_entries(model: Bagel) -> int:
    """Of one layer."""
    entries = sum(parameter.numel() for parameter in adapter_parameters(model).values())
    return entries // model.config.language.num_hidden_layers


def listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Parses names separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return names

    return parse


def main(argv: Sequence[str] | None = None) -> None:
    command = parser(__doc__)
    command.add_argument("--layers", type=int, help="fewer than the model's own")
    command.add_argument("--shapes", type=listed("012"), default=list("012"), help="some of 0,1,2")
    command.add_argument(
        "--modes", type=listed(MODES), default=["denoise", "replay"], help=f"some of {','.join(MODES)}"
    )
    command.add_argument("--profile", action="store_true", help="also the kernels of each mode's first shape")
    command.add_argument(
        "--budget-s", type=float, default=140.0, help="no case begins that would end later (default: 140)"
    )
    options = command.parse_args(argv)
    began = time.perf_counter()
    name, dtype, shapes = SHAPES[device_of(options)]
    shapes = QUICK if options.quick else [shapes[int(index)] for index in options.shapes]
    modes = [mode for mode in MODES if mode in options.modes]  # the base weights come before the adapter
    with Bench("bagel", options, num_cases=len(modes) * len(shapes)) as bench:
        benchmark = Benchmark(options, bench, name, dtype)
        for mode in modes:
            took_s = 0.0
            for shape in shapes:
                case_began = time.perf_counter()
                if case_began - began + took_s > options.budget_s:
                    print(f"{mode} {tuple(shape)} would not fit into --budget-s {options.budget_s:g}")
                    continue
                benchmark.measure(mode, shape)
                took_s = time.perf_counter() - case_began


if __name__ == "__main__":
    main()
