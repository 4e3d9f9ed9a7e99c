# SPDX-License-Identifier: Apache-2.0
"""A stage small enough to be checked by hand: the velocity of a token is a linear map of it."""

from __future__ import annotations

import dataclasses

import torch

from unirl.config import RunConfig, parse
from unirl.ops import flow_log_prob, flow_step, keyed_normal
from unirl.protocols import Replay
from unirl.sde import shifted_sigmas
from unirl.train.plan import RankPlan, plan_updates
from unirl.types import (
    LatentSegment,
    LayoutRecord,
    NoiseRecipe,
    Part,
    SamplingParams,
    fingerprints_of,
    frames_to_keep,
)

CHANNELS = 3


class LinearPolicy(torch.nn.Module):
    """velocity = out(mid(x)); the names are the public ones."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        self.mid = torch.nn.Linear(CHANNELS, 4, bias=False, dtype=dtype)
        self.out = torch.nn.Linear(4, CHANNELS, bias=False, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.out(self.mid(latents))


class LinearStage:
    """Samples and replays with a `LinearPolicy`; a pixel is a token."""

    pixel_stride = 1
    max_side = 64

    def __init__(self, model: LinearPolicy) -> None:
        self.model = model
        self.replayed: list[tuple[str, ...]] = []

    def sigmas(self, params: SamplingParams, canvas: object) -> torch.Tensor:
        return shifted_sigmas(params.num_inference_steps, 3.0)

    @torch.no_grad()
    def sample(self, part: Part, *, decode: bool = True) -> Part:
        assert part.params is not None and part.sde_steps is not None
        params, steps = part.params, part.sde_steps
        dtype = self.model.out.weight.dtype
        frames, log_probs = [], torch.zeros(len(part), steps.shape[1])
        kept = [frames_to_keep(s, params.num_inference_steps) for s in steps.tolist()]
        sigmas = self.sigmas(params, None).expand(len(part), -1)
        for row, canvas in enumerate(part.canvases()):
            one = [part.ids[row]]
            x = keyed_normal(
                (1, canvas.tokens(1), CHANNELS),
                seed=7,
                row_keys=params.noise.initial_keys(one),
                step=0,
                dtype=dtype,
            )
            stored = {0: x}
            for step in range(params.num_inference_steps):
                trained = step in steps[row].tolist()
                x, log_prob = flow_step(
                    x,
                    self.model(x),
                    sigmas[row, step : step + 1],
                    sigmas[row, step + 1 : step + 2],
                    eta=params.eta if trained else 0.0,
                    rule=params.rule,
                    seed=7,
                    row_keys=params.noise.step_keys(one),
                    step=step,
                    trajectory_dtype=dtype,
                    sigma_max=sigmas[row, 1:2],
                )
                stored[step + 1] = x
                if trained:
                    log_probs[row, steps[row].tolist().index(step)] = log_prob[0]
            frames.append(torch.cat([stored[step] for step in kept[row]]))
        segment = LatentSegment.pack(
            frames,
            frame_steps=torch.tensor(kept),
            sde_steps=steps,
            log_probs=log_probs,
            sigmas=sigmas.clone(),
            pad_to=params.canvas.tokens(1),
        )
        layouts = self.layouts(part)
        return part.replace(segment=segment, fingerprints=fingerprints_of(layouts), layouts=layouts)

    def replay(self, part: Part, *, with_means: bool = False) -> Replay:
        self.replayed.append(part.ids)
        assert part.params is not None
        segment: LatentSegment = part.segment
        columns = []
        for slot in range(segment.sde_steps.shape[1]):
            at = segment.sde_steps[:, slot]
            x, following = segment.frame(at), segment.frame(at + 1)
            columns.append(
                flow_log_prob(
                    x,
                    self.model(x),
                    following,
                    segment.sigmas.gather(1, at[:, None])[:, 0],
                    segment.sigmas.gather(1, at[:, None] + 1)[:, 0],
                    eta=part.params.eta,
                    rule=part.params.rule,
                    lengths=segment.token_counts,
                    return_mean=True,
                    sigma_max=segment.sigmas[:, 1],
                )
            )
        log_probs, means, scales = (torch.stack(column, dim=1) for column in zip(*columns, strict=True))
        return Replay(
            log_probs=log_probs,
            token_counts=segment.token_counts,
            fingerprints=fingerprints_of(self.layouts(part)),
            layouts=self.layouts(part),
            means=means if with_means else None,
            scales=scales if with_means else None,
        )

    def layouts(self, part: Part) -> tuple[LayoutRecord, ...]:
        return tuple(
            LayoutRecord.of({"canvas": torch.tensor(list(c)), "prompt": torch.tensor([len(p)])})
            for c, p in zip(part.canvases(), part.prompts, strict=True)
        )


@dataclasses.dataclass
class SoloCollective:
    """A group of one that counts its sums."""

    rank: int = 0
    world_size: int = 1
    num_sums: int = 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_sums += 1
        return tensor


def recipe(**sections: object) -> RunConfig:
    """A run's configuration; scorers and data play no part here."""
    return parse(RunConfig, {"seed": 3, **sections})


def prompts(num_groups: int, siblings: int, canvases: tuple[tuple[int, int], ...] = ((2, 2),)) -> Part:
    """Rows to be sampled: group g has canvas g modulo the number of canvases, and three trained steps of five."""
    params = SamplingParams(
        height=4, width=4, num_inference_steps=5, eta=0.7, rule="flow", noise=NoiseRecipe(7)
    )
    ids = tuple(f"r0.p{g}/{s}" for g in range(num_groups) for s in range(siblings))
    canvas = [list(canvases[g % len(canvases)]) for g in range(num_groups) for _ in range(siblings)]
    return Part(
        ids=ids,
        prompts=("a word",) * len(ids),
        metadata=tuple({"canvas": c} for c in canvas),
        sde_steps=torch.tensor([[0, 1, 3]]).expand(len(ids), 3).clone(),
        params=params,
    )


def batch(
    stage: LinearStage,
    num_groups: int = 4,
    siblings: int = 3,
    *,
    canvases: tuple[tuple[int, int], ...] = ((2, 2),),
    policy_step: int = 0,
    push_version: int = 0,
    seed: int = 0,
) -> Part:
    """Generated rows with advantages drawn from `seed`."""
    part = stage.sample(prompts(num_groups, siblings, canvases))
    rewards = torch.rand(len(part), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ones = torch.ones(len(part), dtype=torch.int64)
    part = part.replace(
        rewards=rewards,
        weights=torch.ones(len(part), dtype=torch.float64),
        push_version=ones * push_version,
        policy_step=ones * policy_step,
    )
    return part.compute_advantages()


def plan_of(part: Part, *, num_updates: int = 1, micro_batch_size: int = 64) -> RankPlan:
    """The plan of a single rank."""
    canvases = part.canvases()
    costs = [float(c.tokens(1)) for c in canvases]
    weights = part.live_weights().tolist()
    plan = plan_updates(part.group_ids, canvases, costs, 1, num_updates, micro_batch_size, weights=weights)
    return plan.for_rank(0)


def ordered(part: Part, plan: RankPlan) -> Part:
    """What the rank is sent."""
    return part.select(plan.rows)
