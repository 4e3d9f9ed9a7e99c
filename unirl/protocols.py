# SPDX-License-Identifier: Apache-2.0
"""What the layers know of each other. Anything that satisfies a protocol can take the part's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from unirl.types import LayoutRecord, Part, Sample


@dataclasses.dataclass(frozen=True)
class Replay:
    """A stage's recomputation of stored transitions of N rows.

    Attributes:
        log_probs: float32 `[N, S]`, differentiable when gradients are on.
        means: `[N, S, seq, C]`, the transition means (only when asked for).
        scales: float32 `[N, S]`, the standard deviation of each transition (only when asked for).
        token_counts: int64 `[N]`.
        fingerprints: int64 `[N, 2]` of what the transformer was given in this replay, on its device.
        layouts: what they were taken of, one a row; read back to the host only to explain a mismatch.
    """

    log_probs: torch.Tensor
    token_counts: torch.Tensor
    fingerprints: torch.Tensor | None = None
    layouts: tuple[LayoutRecord, ...] | None = None
    means: torch.Tensor | None = None
    scales: torch.Tensor | None = None


@runtime_checkable
class Stage(Protocol):
    """A diffusion model as the algorithms see it."""

    pixel_stride: int
    max_side: int

    def sigmas(self, params: Any, canvas: Any) -> torch.Tensor:
        """float64 `[T + 1]` from 1 to 0 for one canvas, by the scheduler's own configuration."""

    def sample(self, part: Part, *, decode: bool = True) -> Part:
        """Denoises every row of `part` (rows of a group contiguous or not, canvases mixed or not).

        Args:
            part: rows with prompts, canvases (metadata), source images, `params` and `sde_steps` (int64 `[N, S]`; where it is
                None or S is 0 nothing is stochastic and nothing but the final latent is stored).
        Returns: the same rows in the same order with `segment`, `fingerprints`, `layouts` and, when `decode`, `media`.
        """

    def replay(self, part: Part, *, with_means: bool = False) -> Replay:
        """Log-probs of the stored transitions of all rows (one canvas) under the current weights."""


@runtime_checkable
class Scorer(Protocol):
    """Scores images. May raise, or return NaN for a row that it cannot judge."""

    name: str

    def score(
        self, images: Sequence[np.ndarray], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Sequence[float]:
        """One number a row; images are float32 `[H, W, C]` in [0, 1]."""


@dataclasses.dataclass(frozen=True)
class WeightPush:
    """What a trainer sends: canonical tensors (public name, wire dtype, unfused) and how to prove that they landed."""

    push_version: int
    policy_step: int
    kind: str
    tensors: Mapping[str, torch.Tensor]
    digest: tuple[int, int]
    adapter: Mapping[str, Any] | None = None


@runtime_checkable
class Engine(Protocol):
    """Generates rows with its own copy of the weights, or with the trainer's.

    `noise_keyed_by_row`: a row's noise depends on its id alone, so any rank may generate it. `min_pack_rows`: the
    fewest rows of a group that one call takes. `packs_groups`: groups of one canvas and equally many rows run as one batch.
    """

    name: str
    noise_keyed_by_row: bool
    min_pack_rows: int
    packs_groups: bool

    def check(self, part: Part) -> None:
        """Raises a `ValueError` that names the engine when it cannot honour a row (canvas, source image)."""

    def generate(self, request: Sample) -> Sample:
        """Fills the frontier: `segment`, `media`, `push_version`, `policy_step`, `fingerprints`."""

    def load(self, push: WeightPush) -> tuple[int, int]:
        """Installs a push; returns the digest recomputed from the live parameters."""

    def sleep(self) -> None:
        """Gives memory back between generations."""

    def wake(self) -> None:
        """Undoes `sleep`; the next generation gives the bits it would have given without it."""


@runtime_checkable
class Collective(Protocol):
    """The collectives that a training rank needs."""

    rank: int
    world_size: int

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place sum over ranks."""


@runtime_checkable
class Dispatcher(Protocol):
    """Where the async runtime sends generations."""

    def launch(self, request: Any) -> Any:
        """Starts a generation, returns its handle at once."""

    def is_ready(self, handle: Any) -> bool:
        """Whether `collect` would not wait."""

    def wait(self, handle: Any) -> None:
        """Blocks until the generation has finished (or failed)."""

    def collect(self, handle: Any) -> Sequence[Any]:
        """The finished groups; raises what the generation raised."""


@runtime_checkable
class UnitSource(Protocol):
    """Where a rank gets its next unit of generate+score work from."""

    def pull(self, rank: int) -> Any | None:
        """The next units for `rank`, now its own to run; None when nothing is left for it."""

    def done_and_pull(self, rank: int, lease: int, seconds: float | None) -> tuple[bool, Any | None]:
        """Reports units as done in `seconds`, and pulls: (False when they were taken back, the next ones)."""


@runtime_checkable
class MetricsSink(Protocol):
    """Takes one flat mapping a rollout."""

    def write(self, step: int, metrics: Mapping[str, float | int | str | None]) -> None: ...

    def close(self) -> None: ...
