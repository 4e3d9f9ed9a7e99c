# SPDX-License-Identifier: Apache-2.0
"""What one generation is asked to do, and the address of its noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from unirl.ops import row_key
from unirl.types.canvas import Canvas

Rule = Literal["flow", "cps", "dance"]

STREAM_TRAIN = 0
STREAM_EVAL = 1


@dataclasses.dataclass(frozen=True)
class NoiseRecipe:
    """Noise as a function of (seed, stream, row id, step): nothing about batches, ranks or order enters.

    Args:
        seed: the run's seed.
        stream: `STREAM_TRAIN` or `STREAM_EVAL`; one never advances the other.
        init_same_noise: siblings start from one initial latent, keyed by their group, and differ in step noise only.
    """

    seed: int
    stream: int = STREAM_TRAIN
    init_same_noise: bool = False

    def initial_keys(self, ids: Sequence[str]) -> torch.Tensor:
        """int64 [N]: keys of the initial latents x_T."""
        return self._keys([group_of(i) for i in ids] if self.init_same_noise else ids)

    def step_keys(self, ids: Sequence[str]) -> torch.Tensor:
        """int64 [N]: keys of the noise of the SDE steps."""
        return self._keys(ids)

    def _keys(self, ids: Sequence[str]) -> torch.Tensor:
        return torch.tensor([row_key(f"{self.stream}:{i}") for i in ids], dtype=torch.int64)


def group_of(row_id: str) -> str:
    """The parent path of a row id (`r12.p7/3` -> `r12.p7`); a root is its own group."""
    return row_id.rsplit("/", 1)[0]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How rows are denoised. `height`, `width` (pixels) are the default canvas and the storage bound.

    `sde_steps` is not here: the trained steps are row data, one set a group.
    """

    height: int
    width: int
    num_inference_steps: int
    eta: float
    rule: Rule
    noise: NoiseRecipe
    guidance_scale: float = 1.0
    cfg_img_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    cfg_renorm_type: Literal["global", "channel", "text_channel"] = "global"
    cfg_renorm_min: float = 0.0
    shift: float | None = None
    trajectory_dtype: Literal["float32", "bfloat16"] = "float32"
    storage: Literal["ragged", "padded"] = "ragged"

    @property
    def canvas(self) -> Canvas:
        return Canvas(self.height, self.width)

    @property
    def torch_trajectory_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.trajectory_dtype]
