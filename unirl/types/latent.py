# SPDX-License-Identifier: Apache-2.0
"""The stored part of a denoising trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unirl.ops import pad_latents, trim_latents
from unirl.types.columns import Columns, row

UNUSED = -1


@dataclasses.dataclass(frozen=True)
class LatentSegment(Columns):
    """Frames, log-probs and schedule of the trained steps of N rows.

    Attributes:
        latents: `[N, K, seq, C]` in the trajectory dtype: the frames {i, i+1 for i in the trained steps} and the final latent,
            right-padded with zeros on `seq` to the storage bound.
        frame_steps: int64 `[N, K]`, the step index of every frame; `UNUSED` marks a slot that a row does not need.
        token_counts: int64 `[N]`, real tokens a row.
        sde_steps: int64 `[N, S]`, the trained steps, ascending.
        log_probs: float32 `[N, S]` under the generating weights, of the stored value (after the round trip through the dtype).
        sigmas: float64 `[N, T + 1]`, the whole schedule of the row.
    """

    latents: torch.Tensor = row()
    frame_steps: torch.Tensor = row()
    token_counts: torch.Tensor = row()
    sde_steps: torch.Tensor = row()
    log_probs: torch.Tensor = row()
    sigmas: torch.Tensor = row()

    def frame(self, steps: torch.Tensor) -> torch.Tensor:
        """`[N, seq, C]`: each row's latent at its own step index (`steps` int64 `[N]`); found by index, never by time."""
        match = self.frame_steps == steps[:, None]
        if not bool(match.any(dim=1).all()):
            lost = torch.nonzero(~match.any(dim=1)).flatten().tolist()
            raise ValueError(
                f"steps {steps[lost].tolist()} of rows {lost} are not stored; stored: {self.frame_steps[lost].tolist()}"
            )
        slot = match.to(torch.int8).argmax(dim=1).to(self.latents.device)
        return self.latents[torch.arange(len(self), device=self.latents.device), slot]

    def final(self) -> list[torch.Tensor]:
        """The clean latents, one `[seq_i, C]` a row, without padding."""
        last = self.frame(torch.full((len(self),), self.sigmas.shape[1] - 1, dtype=torch.long))
        return [r[0] for r in trim_latents(last[:, None], self.token_counts.tolist())]

    def trimmed(self) -> LatentSegment:
        """The same rows stored without padding beyond the longest of them."""
        longest = int(self.token_counts.max())
        return (
            self if longest == self.latents.shape[2] else self.replace(latents=self.latents[:, :, :longest])
        )

    def nbytes(self) -> int:
        """Bytes of the stored frames, padding included."""
        return self.latents.numel() * self.latents.element_size()

    @classmethod
    def _concat_column(cls, name: str, parts: list[Any]) -> Any:
        """Groups may keep different numbers of frames: the shorter ones get `UNUSED` slots."""
        if name == "frame_steps":
            most = max(p.shape[1] for p in parts)
            parts = [torch.nn.functional.pad(p, (0, most - p.shape[1]), value=UNUSED) for p in parts]
        if name == "latents":
            most, longest = max(p.shape[1] for p in parts), max(p.shape[2] for p in parts)
            parts = [
                torch.nn.functional.pad(p, (0, 0, 0, longest - p.shape[2], 0, most - p.shape[1]))
                for p in parts
            ]
        return torch.cat(parts)

    @classmethod
    def pack(
        cls,
        frames: Sequence[torch.Tensor],
        *,
        frame_steps: torch.Tensor,
        sde_steps: torch.Tensor,
        log_probs: torch.Tensor,
        sigmas: torch.Tensor,
        pad_to: int,
    ) -> LatentSegment:
        """Stores one `[K, seq_i, C]` a row, padded to `pad_to` tokens in one launch."""
        return cls(
            latents=pad_latents(list(frames), pad_to=pad_to),
            frame_steps=frame_steps,
            token_counts=torch.tensor([f.shape[1] for f in frames], dtype=torch.int64),
            sde_steps=sde_steps,
            log_probs=log_probs,
            sigmas=sigmas,
        )


@dataclasses.dataclass(frozen=True)
class SegmentRef(Columns):
    """Rows of segments that lie in a store: which object (an opaque handle) and which row of it. Moving rows moves no data."""

    handles: tuple[Any, ...] = row()
    rows: tuple[int, ...] = row()

    @classmethod
    def of(cls, handle: Any, num_rows: int) -> SegmentRef:
        """All rows of one stored segment."""
        return cls(handles=(handle,) * num_rows, rows=tuple(range(num_rows)))

    def objects(self) -> list[Any]:
        """The distinct handles, in order of first use."""
        return list(dict.fromkeys(self.handles))

    def resolve(self, stored: Mapping[Any, LatentSegment]) -> LatentSegment:
        """The rows themselves, in order, from `{handle: segment}`."""
        pieces: list[LatentSegment] = []
        start = 0
        for end in range(1, len(self) + 1):
            if end == len(self) or self.handles[end] != self.handles[start]:
                pieces.append(stored[self.handles[start]].select(self.rows[start:end]))
                start = end
        return LatentSegment.concat(pieces)


def frames_to_keep(sde_steps: Sequence[int], num_inference_steps: int) -> list[int]:
    """Step indices of the stored frames: {i, i + 1 for every trained i} and the final latent."""
    return sorted({f for i in sde_steps for f in (i, i + 1)} | {num_inference_steps})
