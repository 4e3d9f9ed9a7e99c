# SPDX-License-Identifier: Apache-2.0
"""An exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unirl.config import EmaConfig


class Ema:
    """Shadow <- d * shadow + (1 - d) * weight after every optimizer step that was taken.

    With `warmup`, d = min(decay, (1 + t) / (10 + t)) in update t = 0, 1, ..., so that the first steps are not
    held back by the start. The shadows are float32 (float64 for float64 weights).
    """

    def __init__(self, values: Mapping[str, torch.Tensor], config: EmaConfig) -> None:
        if not 0 < config.decay < 1:
            raise ValueError(
                f"optim.ema.decay is {config.decay}; allowed here: above 0 and below 1 (0 switches the average off)"
            )
        self.config = config
        self.num_updates = 0
        self.tensors = {name: _wide(value.detach()).clone() for name, value in values.items()}

    def decay(self) -> float:
        """d of the next update."""
        if not self.config.warmup:
            return self.config.decay
        return min(self.config.decay, (1 + self.num_updates) / (10 + self.num_updates))

    @torch.no_grad()
    def update(self, values: Mapping[str, torch.Tensor]) -> None:
        decay = self.decay()
        for name, shadow in self.tensors.items():
            shadow.mul_(decay).add_(values[name].detach().to(shadow.dtype), alpha=1.0 - decay)
        self.num_updates += 1

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], num_updates: int) -> None:
        if set(tensors) != set(self.tensors):
            raise ValueError(
                "the saved average is of other weights than those trained here; check model.train and model.lora.targets"
            )
        for name, shadow in self.tensors.items():
            shadow.copy_(tensors[name])
        self.num_updates = num_updates


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value if value.dtype is torch.float64 else value.float()
