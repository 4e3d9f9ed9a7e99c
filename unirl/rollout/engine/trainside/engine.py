# SPDX-License-Identifier: Apache-2.0
"""Generates with the same stage that replays, on a model of its own or on the trainer's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unirl.protocols import Stage, WeightPush
from unirl.types import Part, Sample, check_canvases


class TrainsideEngine:
    """An `Engine` over a `Stage`.

    Args:
        stage: samples rows.
        model: the module behind the stage; `sleep` moves it to host memory when it has a GPU of its own.
        install: puts a push into `model` and returns the digest of what is live then.
        owns_model: False when a trainer on the same rank trains this very module: `sleep` then leaves it alone.
    """

    name = "trainside"
    noise_keyed_by_row = True
    min_pack_rows = 1
    packs_groups = True

    def __init__(
        self,
        stage: Stage,
        model: torch.nn.Module,
        install: Callable[[torch.nn.Module, WeightPush], tuple[int, int]],
        *,
        owns_model: bool = True,
    ) -> None:
        self._stage = stage
        self._model = model
        self._install = install
        self._owns_model = owns_model
        self._awake_device: torch.device | None = None
        self.push_version = 0
        self.policy_step = 0

    def check(self, part: Part) -> None:
        if part.params is None:
            raise ValueError("engine trainside: the rows carry no sampling params")
        try:
            check_canvases(
                part.ids,
                part.canvases(),
                part.params.canvas,
                pixel_stride=self._stage.pixel_stride,
                max_side=self._stage.max_side,
            )
        except ValueError as error:
            raise ValueError(f"engine trainside cannot honour a canvas: {error}") from None

    def generate(self, request: Sample) -> Sample:
        if self._awake_device is not None:
            raise RuntimeError("engine trainside is asleep; call wake() before generate()")
        rows = request.frontier
        with torch.no_grad():
            part = self._stage.sample(rows)
        stamp = torch.ones(len(part), dtype=torch.int64)
        part = part.replace(push_version=stamp * self.push_version, policy_step=stamp * self.policy_step)
        return request.replace_frontier(part)

    def load(self, push: WeightPush) -> tuple[int, int]:
        digest = self._install(self._model, push)
        self.push_version, self.policy_step = push.push_version, push.policy_step
        return digest

    def sleep(self) -> None:
        device = next(self._model.parameters()).device
        if self._owns_model and device.type != "cpu" and self._awake_device is None:
            self._awake_device = device
            self._model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self) -> None:
        if self._awake_device is not None:
            self._model.to(self._awake_device)
            self._awake_device = None
