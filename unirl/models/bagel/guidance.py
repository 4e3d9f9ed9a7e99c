# SPDX-License-Identifier: Apache-2.0
"""Classifier-free guidance of BAGEL: which branches a step needs, and their combination row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.models.bagel.context import Contexts
from unirl.models.bagel.model import Bagel
from unirl.ops import guided_velocity
from unirl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How the branches are combined.

    Attributes:
        text_scale: pull away from the context without the prompt; 1 means no text guidance.
        image_scale: pull away from the context without the source image; 1 means none.
        interval: guidance acts at times ``lo < t <= hi``.
        renorm: ``"global"`` (one norm a row), ``"channel"`` (one a token) or ``"text_channel"`` (one a token,
            after the text guidance only).
        renorm_min: smallest factor the renormalisation may apply; the largest is 1.
    """

    text_scale: float = 1.0
    image_scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    renorm: str = "global"
    renorm_min: float = 0.0

    def __post_init__(self) -> None:
        if self.text_scale < 1.0 or self.image_scale < 1.0:
            raise ValueError(
                f"guidance_scale is {self.text_scale} and cfg_img_scale {self.image_scale}; "
                "allowed: 1 (off) or more, for each"
            )
        if self.image_scale > 1.0 and self.text_scale == 1.0:
            # BAGEL's public inference drops the image guidance in this case without a word.
            raise ValueError(
                f"cfg_img_scale is {self.image_scale} but guidance_scale is 1: BAGEL's image guidance needs "
                "text guidance; raise sampling.guidance_scale above 1 or set sampling.cfg_img_scale to 1"
            )

    @classmethod
    def of(cls, params: SamplingParams) -> Guidance:
        """The guidance that sampling parameters ask for."""
        return cls(
            text_scale=params.guidance_scale,
            image_scale=params.cfg_img_scale,
            interval=params.cfg_interval,
            renorm=params.cfg_renorm_type,
            renorm_min=params.cfg_renorm_min,
        )

    @property
    def contexts(self) -> tuple[str, ...]:
        """Names of the contexts that it reads."""
        names = ["gen"]
        if self.text_scale != 1.0:
            names.append("cfg_text")
        if self.image_scale != 1.0:
            names.append("cfg_img")
        return tuple(names)

    def velocity(
        self,
        model: Bagel,
        latents: Tensor,
        time: Tensor,
        contexts: Contexts,
        *,
        siblings: int,
        latent_position_ids: Tensor,
    ) -> Tensor:
        """The guided velocity ``[N, L, C]``; arguments as of :meth:`Bagel.velocity`, ``time`` on the host.

        Rows outside the interval get the conditional velocity bit for bit. Branches that no row needs are not
        run.
        """
        lo, hi = self.interval
        active = (time > lo) & (time <= hi)
        # A blocking copy would wait for the step before.
        device_time = time.float().to(latents.device, non_blocking=True)

        def branch(name: str) -> Tensor:
            return model.velocity(
                latents,
                device_time,
                contexts,
                siblings=siblings,
                latent_position_ids=latent_position_ids,
                which=name,
            )

        conditional = branch("gen")
        if len(self.contexts) == 1 or not bool(active.any()):
            return conditional

        def scales(value: float) -> Tensor:
            return torch.where(active, value, 1.0).to(latents.device, non_blocking=True)

        return guided_velocity(
            conditional,
            branch("cfg_text"),
            branch("cfg_img") if "cfg_img" in self.contexts else None,
            scales(self.text_scale),
            scales(self.image_scale),
            renorm=self.renorm,
            renorm_min=self.renorm_min,
        )
