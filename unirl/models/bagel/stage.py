# SPDX-License-Identifier: Apache-2.0
"""BAGEL as a diffusion stage: rows in, denoised rows out, and the replay of what was stored of them.

Rows are worked on in batches of one canvas whose groups have equally many siblings, so that the siblings of a
group read one prefix. Which rows share a batch is no one's business but this file's: results come back in the
rows' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.models.bagel.batching import RowBatch, in_row_order, plan_batches
from unirl.models.bagel.codec import Codec, load_codec, tokens_to_latents
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.context import Contexts, build_contexts
from unirl.models.bagel.fingerprint import group_layout
from unirl.models.bagel.guidance import Guidance
from unirl.models.bagel.layout import Layout
from unirl.models.bagel.model import Bagel
from unirl.models.bagel.tokenizer import Tokenizer, load_tokenizer
from unirl.models.bagel.weights import load_model
from unirl.ops import flow_log_prob, flow_step, keyed_normal
from unirl.protocols import Replay
from unirl.sde import shifted_sigmas
from unirl.types import (
    UNUSED,
    LatentSegment,
    LayoutRecord,
    Part,
    SamplingParams,
    check_canvases,
    fingerprints_of,
    frames_to_keep,
    to_host,
)


class BagelStage:
    """Samples and replays rows with one BAGEL.

    Args:
        model: the weights; an injected adapter is part of them.
        codec: pixels to latents and back.
        tokenizer: prompts to ids.
    """

    def __init__(self, model: Bagel, codec: Codec, tokenizer: Tokenizer) -> None:
        self.model = model
        self.codec = codec
        self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        config: BagelConfig | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> BagelStage:
        """Model, codec and tokenizer of a checkpoint folder (``ValueError`` naming what it lacks)."""
        model = load_model(folder, config, device=device, dtype=dtype)
        codec = load_codec(model.config, folder, device=device, dtype=dtype)
        return cls(model, codec, load_tokenizer(model.config, folder))

    @property
    def pixel_stride(self) -> int:
        """Pixels a token covers, a side."""
        return self.model.config.pixel_stride

    @property
    def max_side(self) -> int:
        """Longest canvas side in tokens."""
        return self.model.config.max_latent_size

    def sigmas(self, params: SamplingParams, canvas: Any) -> Tensor:
        """float64 ``[T + 1]`` from 1 to 0: BAGEL's static shift, the same on every canvas."""
        shift = self.model.config.shift if params.shift is None else params.shift
        return shifted_sigmas(params.num_inference_steps, shift)

    @torch.no_grad()
    def sample(self, part: Part, *, decode: bool = True) -> Part:
        """Denoise every row; see :meth:`unirl.protocols.Stage.sample`.

        Frames run through ``params.trajectory_dtype`` at every step, so a stored frame is what the model was
        given.

        Raises:
            ValueError: a canvas that the model or the storage bound does not allow, trained steps outside the
                schedule, trained steps without noise (``eta`` 0), a guidance that BAGEL does not have.
        """
        params = _params(part)
        canvases = part.canvases()
        check_canvases(
            part.ids, canvases, params.canvas, pixel_stride=self.pixel_stride, max_side=self.max_side
        )
        sde_steps = _checked_steps(part)
        guidance = Guidance.of(params)
        num_steps = params.num_inference_steps
        kept = [frames_to_keep(steps, num_steps) for steps in sde_steps.tolist()]
        slots = max(map(len, kept))
        frame_steps = torch.tensor([steps + [UNUSED] * (slots - len(steps)) for steps in kept])
        sigmas = torch.stack([self.sigmas(params, canvas) for canvas in canvases])
        log_probs = torch.zeros(sde_steps.shape, device=self.model.device)
        frames: list[Tensor] = [torch.empty(0)] * len(part)
        media: list[np.ndarray] = [np.empty(0)] * len(part)
        layouts: list[list[LayoutRecord]] = []
        batches = plan_batches(part, self.model, self.codec, self.tokenizer)
        for batch in batches:
            contexts = build_contexts(self.model, batch.requests, guidance.contexts)
            layouts.append(self._layouts(batch, contexts))
            stored, found = self._denoise(
                part.select(batch.rows),
                batch,
                contexts,
                guidance,
                sigmas[batch.rows],
                sde_steps[batch.rows],
                frame_steps[batch.rows],
            )
            log_probs[batch.rows] = found
            final = (frame_steps[batch.rows] == num_steps).int().argmax(dim=1)
            images = (
                self._decoded(stored[torch.arange(len(batch.rows)), final], batch.layout) if decode else []
            )
            for position, row in enumerate(batch.rows):
                frames[row] = stored[position]
                if decode:
                    media[row] = images[position]
        segment = LatentSegment.pack(
            frames,
            frame_steps=frame_steps,
            sde_steps=sde_steps,
            log_probs=log_probs.cpu(),
            sigmas=sigmas,
            pad_to=params.canvas.tokens(self.pixel_stride),
            storage=params.storage,
        )
        return part.replace(
            segment=segment,
            fingerprints=_fingerprints(layouts, batches).cpu(),
            layouts=_by_row(to_host([record for groups in layouts for record in groups]), batches),
            media=tuple(media) if decode else None,
        )

    def replay(self, part: Part, *, with_means: bool = False) -> Replay:
        """Log-probs of the stored transitions under the current weights; see
        :meth:`unirl.protocols.Stage.replay`.

        Raises:
            ValueError: rows without a segment, rows of several canvases when means are asked for, or a
                segment whose token counts are not those of the rows' canvases.
        """
        params = _params(part)
        segment: LatentSegment | None = part.segment
        if segment is None:
            raise ValueError("replay needs rows with a stored segment; sample them first")
        guidance = Guidance.of(params)
        batches = plan_batches(part, self.model, self.codec, self.tokenizer)
        if with_means and len({batch.layout.canvas for batch in batches}) > 1:
            raise ValueError("means of several canvases have no common shape; replay one canvas at a time")
        log_probs: list[Tensor] = []
        means: list[Tensor] = []
        scales: list[Tensor] = []
        layouts: list[list[LayoutRecord]] = []
        for batch in batches:
            rows = segment.select(batch.rows)
            if set(rows.token_counts.tolist()) != {batch.layout.num_latents}:
                raise ValueError(
                    f"rows {[part.ids[row] for row in batch.rows]} are stored with "
                    f"{rows.token_counts.tolist()} tokens; their canvas "
                    f"{batch.layout.canvas} has {batch.layout.num_latents}"
                )
            contexts = build_contexts(self.model, batch.requests, guidance.contexts)
            layouts.append(self._layouts(batch, contexts))
            found = [
                self._replayed_step(rows, slot, batch, contexts, guidance, params)
                for slot in range(rows.sde_steps.shape[1])
            ]
            log_probs.append(_stacked([step[0] for step in found], len(batch.rows), self.model.device))
            if with_means:
                means.append(torch.stack([step[1] for step in found], dim=1))
                scales.append(torch.stack([step[2] for step in found], dim=1))
        return Replay(
            log_probs=in_row_order(log_probs, batches),
            token_counts=segment.token_counts,
            fingerprints=_fingerprints(layouts, batches),
            layouts=_by_row([record for groups in layouts for record in groups], batches),
            means=in_row_order(means, batches) if with_means else None,
            scales=in_row_order(scales, batches).float() if with_means else None,
        )

    def _denoise(
        self,
        part: Part,
        batch: RowBatch,
        contexts: Contexts,
        guidance: Guidance,
        sigmas: Tensor,
        sde_steps: Tensor,
        frame_steps: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Kept frames ``[n, K, L, C]`` and log-probs ``[n, S]`` of one batch."""
        params, device = _params(part), self.model.device
        shape = (len(part), batch.layout.num_latents, self.model.config.latent_channels)
        dtype = params.torch_trajectory_dtype
        latents = keyed_normal(
            shape, seed=params.noise.seed, row_keys=params.noise.initial_keys(part.ids), step=0, device=device
        ).to(dtype)
        step_keys = params.noise.step_keys(part.ids).to(device)
        device_sigmas = sigmas.to(device)
        # float64, as the number that a replay is given.
        every_step = torch.arange(params.num_inference_steps)
        is_trained = (sde_steps[:, :, None] == every_step).any(dim=1)
        etas = (params.eta * is_trained.double()).to(device)
        frames = torch.zeros((shape[0], frame_steps.shape[1], *shape[1:]), dtype=dtype, device=device)
        log_probs = torch.zeros(sde_steps.shape, device=device)
        _keep(frames, frame_steps == 0, latents)
        for step in range(params.num_inference_steps):
            velocity = guidance.velocity(
                self.model,
                latents,
                sigmas[:, step],
                contexts,
                siblings=batch.siblings,
                latent_position_ids=batch.positions,
            )
            trained = sde_steps == step
            latents, log_prob = flow_step(
                latents,
                velocity,
                device_sigmas[:, step],
                device_sigmas[:, step + 1],
                eta=etas[:, step],
                rule=params.rule,
                seed=params.noise.seed,
                row_keys=step_keys,
                step=step,
                trajectory_dtype=dtype,
                sigma_max=device_sigmas[:, 1],
            )
            if bool(trained.any()):
                log_probs = torch.where(trained.to(device), log_prob[:, None], log_probs)
            _keep(frames, frame_steps == step + 1, latents)
        return frames, log_probs

    def _replayed_step(
        self,
        rows: LatentSegment,
        slot: int,
        batch: RowBatch,
        contexts: Contexts,
        guidance: Guidance,
        params: SamplingParams,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob, mean and scale of every row's ``slot``-th trained step."""
        device, steps = self.model.device, rows.sde_steps[:, slot]
        num_latents = batch.layout.num_latents
        sample, following = (rows.frame(at)[:, :num_latents].to(device) for at in (steps, steps + 1))
        sigma, sigma_next = (rows.sigmas.gather(1, at[:, None])[:, 0] for at in (steps, steps + 1))
        velocity = guidance.velocity(
            self.model,
            sample,
            sigma,
            contexts,
            siblings=batch.siblings,
            latent_position_ids=batch.positions,
        )
        return flow_log_prob(
            sample,
            velocity,
            following,
            sigma.to(device),
            sigma_next.to(device),
            eta=params.eta,
            rule=params.rule,
            return_mean=True,
            sigma_max=rows.sigmas[:, 1].to(device),
        )

    def _layouts(self, batch: RowBatch, contexts: Contexts) -> list[LayoutRecord]:
        """One record a group, on the device."""
        return [
            group_layout(
                contexts,
                group,
                marker_ids=self.model.marker_ids,
                latent_position_ids=batch.positions,
                canvas=batch.layout.canvas,
            )
            for group in range(len(batch.requests))
        ]

    def _decoded(self, tokens: Tensor, layout: Layout) -> list[np.ndarray]:
        """Images float32 ``[H, W, c]`` in [0, 1]."""
        pixels = self.codec.decode(tokens_to_latents(self.model.config, tokens.float(), layout.grid))
        images = (pixels.float() / 2 + 0.5).clamp(0.0, 1.0).permute(0, 2, 3, 1)
        return list(images.cpu().numpy())


def _fingerprints(layouts: Sequence[Sequence[LayoutRecord]], batches: Sequence[RowBatch]) -> Tensor:
    """int64 ``[N, 2]`` in row order, on the device."""
    found = [
        fingerprints_of(groups).repeat_interleave(batch.siblings, dim=0)
        for groups, batch in zip(layouts, batches, strict=True)
    ]
    return in_row_order(found, batches)


def _by_row(records: Sequence[LayoutRecord], batches: Sequence[RowBatch]) -> tuple[LayoutRecord, ...]:
    """The groups' records in row order; siblings share theirs."""
    rows = [row for batch in batches for row in batch.rows]
    siblings = [batch.siblings for batch in batches for _ in batch.requests]
    spread = [record for record, count in zip(records, siblings, strict=True) for _ in range(count)]
    return tuple(record for _, record in sorted(zip(rows, spread, strict=True), key=lambda pair: pair[0]))


def _params(part: Part) -> SamplingParams:
    if part.params is None:
        raise ValueError("these rows carry no sampling params; fork them from their prompts with params")
    return part.params


def _checked_steps(part: Part) -> Tensor:
    params = _params(part)
    if part.sde_steps is None:
        return torch.zeros((len(part), 0), dtype=torch.int64)
    sde_steps = part.sde_steps.to(device="cpu", dtype=torch.int64)
    if sde_steps.ndim != 2:
        raise ValueError(
            f"sde_steps has shape {list(sde_steps.shape)}; expected [{len(part)}, S], one set a row"
        )
    last = params.num_inference_steps - (2 if params.rule == "cps" else 1)
    if sde_steps.numel():
        if int(sde_steps.min()) < 0 or int(sde_steps.max()) > last:
            raise ValueError(
                f"trained steps {sde_steps.unique().tolist()} of {params.num_inference_steps} with rule "
                f"{params.rule!r}; allowed: 0 to {last}"
            )
        if params.eta == 0:
            raise ValueError(
                "sampling.eta is 0, which makes no step random: train no steps, or set eta above 0"
            )
    return sde_steps


def _keep(frames: Tensor, where: Tensor, latents: Tensor) -> None:
    """Write each row's latents into the slot that ``where`` ``[n, K]`` marks, if it marks one."""
    if bool(where.all(dim=0).any()):
        frames[:, int(where.all(dim=0).int().argmax())] = latents
    elif bool(where.any()):
        rows, slots = torch.nonzero(where, as_tuple=True)
        frames[rows.to(frames.device), slots.to(frames.device)] = latents[rows.to(frames.device)]


def _stacked(columns: Sequence[Tensor], rows: int, device: torch.device) -> Tensor:
    return torch.stack(list(columns), dim=1) if columns else torch.zeros((rows, 0), device=device)
