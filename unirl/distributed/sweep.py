# SPDX-License-Identifier: Apache-2.0
"""Measures what calls of the real engine cost on this machine: the sweep that the cost model is fitted to."""

from __future__ import annotations

import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from unirl.config import RunConfig
from unirl.data import PromptDataset, load_dataset
from unirl.distributed.models import build_model, model_limits
from unirl.distributed.workloads import RowCosts
from unirl.rollout.engine.trainside import TrainsideEngine
from unirl.schedule.fit import Measurement
from unirl.train.weights import apply_push
from unirl.types import Canvas, NoiseRecipe, Part, Sample, SamplingParams

LONG_PROMPT = 6
"""A long prompt repeats the dataset's first one so often."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the engine: `rows` siblings of one prompt. `source` is the side in pixels of a square source image; 0 is none."""

    canvas: Canvas
    steps: int
    rows: int
    prompt: str
    source: int = 0


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """Shapes to fit to, and shapes to test the fit on."""

    fitted: tuple[Shape, ...]
    held_out: tuple[Shape, ...]


def plan_sweep(
    config: RunConfig,
    *,
    canvases: Sequence[Canvas] = (),
    steps: Sequence[int] = (),
    rows: Sequence[int] = (),
    sources: Sequence[int] = (),
) -> SweepPlan:
    """Every combination; a fifth of them, and the recipe's own shapes, are held out.

    By default: the storage bound, three quarters and half of its sides; 2 and 6 steps; 1 row, half a micro-batch and a whole one;
    a short and a long prompt; no source image, and where the dataset has any, two sizes.
    """
    dataset = load_dataset(config.data.train, "data.train")
    limits = model_limits(config)
    stride = limits.pixel_stride
    bound = Canvas(config.sampling.height, config.sampling.width)
    most = min(config.reward_stack.micro_batch_size, config.samples_per_prompt)
    canvases = canvases or [_scaled(bound, share, stride) for share in (1.0, 0.75, 0.5)]
    steps = steps or (2, 6)
    rows = rows or sorted({1, max(1, most // 2), most})
    prompt = dataset[0].prompt
    prompts = (prompt, " ".join([prompt] * LONG_PROMPT))
    if not sources:
        sources = (0, max(bound) // 2, max(bound)) if dataset.has_images else (0,)
    grid = [
        Shape(*values) for values in itertools.product(dict.fromkeys(canvases), steps, rows, prompts, sources)
    ]
    random.Random(0).shuffle(grid)
    own = [
        Shape(canvas, config.sampling.num_inference_steps, most, prompt)
        for canvas in _canvases(dataset, bound)
    ]
    held_out = list(dict.fromkeys([*grid[::5], *own]))
    return SweepPlan(tuple(shape for shape in grid if shape not in held_out), tuple(held_out))


def measure(
    config: RunConfig,
    shapes: Sequence[Shape],
    *,
    repeats: int = 3,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> list[Measurement]:
    """Median seconds of each shape. Repeats go round all shapes, so that a machine that drifts does so for all.

    Args:
        told: (calls made, calls in all) after every call.
    """
    priced = dataclasses.replace(config, reward_stack=dataclasses.replace(config.reward_stack, cost={}))
    costs = RowCosts(priced)
    model, stage = build_model(config, rollout_only=True)
    engine = TrainsideEngine(stage, model, apply_push)
    requests = [_request(config, shape, number) for number, shape in enumerate(shapes)]
    seconds: list[list[float]] = [[] for _ in shapes]
    total = len(shapes) * (repeats + 1)
    for done, (turn, index) in enumerate(_rounds(repeats + 1, len(shapes)), start=1):
        begin = time.perf_counter()
        engine.generate(requests[index])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn:  # the first round compiles, tunes and allocates
            seconds[index].append(time.perf_counter() - begin)
        told(done, total)
    workloads = [costs.workloads(request.frontier)[0] for request in requests]
    return [
        Measurement(workload, shape.rows, statistics.median(times))
        for workload, shape, times in zip(workloads, shapes, seconds, strict=True)
    ]


def _rounds(num_rounds: int, num_shapes: int) -> Iterator[tuple[int, int]]:
    return itertools.product(range(num_rounds), range(num_shapes))


def _request(config: RunConfig, shape: Shape, number: int) -> Sample:
    sampling = config.sampling
    params = SamplingParams(
        height=sampling.height,
        width=sampling.width,
        num_inference_steps=shape.steps,
        eta=sampling.eta,
        rule=sampling.rule,
        noise=NoiseRecipe(config.seed),
        guidance_scale=sampling.guidance_scale,
        cfg_img_scale=sampling.cfg_img_scale,
        cfg_interval=sampling.cfg_interval,
        cfg_renorm_type=sampling.cfg_renorm_type,
        cfg_renorm_min=sampling.cfg_renorm_min,
        shift=sampling.shift,
        trajectory_dtype=sampling.trajectory_dtype,
    )
    images = None
    if shape.source:
        pixels = np.random.default_rng(number).integers(
            0, 256, (shape.source, shape.source, 3), dtype=np.uint8
        )
        images = (pixels,)
    prompts = Part(
        ids=(f"sweep.p{number}",),
        prompts=(shape.prompt,),
        metadata=({"canvas": list(shape.canvas)},),
        images=images,
        params=params,
    )
    request = Sample((prompts,)).fork(shape.rows, params)
    trained = torch.zeros((shape.rows, 1), dtype=torch.int64)
    return request.replace_frontier(request.frontier.replace(sde_steps=trained))


def _scaled(bound: Canvas, share: float, stride: int) -> Canvas:
    height, width = (max(stride, int(side * share) // stride * stride) for side in bound)
    return Canvas(height, width)


def _canvases(dataset: PromptDataset, bound: Canvas) -> list[Canvas]:
    """The first few canvases of the dataset."""
    given = [row.metadata.get("canvas") for row in itertools.islice(dataset, 200)]
    found = [bound if value is None else Canvas.parse(value, dataset.name) for value in given]
    return list(dict.fromkeys(found))[:6]
