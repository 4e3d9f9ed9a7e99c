# SPDX-License-Identifier: Apache-2.0
"""The stored part of a denoising trajectory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch

from unirl.ops import pad_latents, trim_latents
from unirl.types.columns import Columns, row
from unirl.types.ragged import RaggedLatents

UNUSED = -1


Storage = Literal["ragged", "padded"]


@dataclasses.dataclass(frozen=True)
class LatentSegment(Columns):
    """Frames, log-probs and schedule of the trained steps of N rows.

    Attributes:
        latents: in the trajectory dtype: the frames {i, i+1 for i in the trained steps} and the final latent. Either *padded*,
            `[N, K, seq, C]` with zeros on the right of `seq` up to the storage bound, or *ragged*, without any padding.
        frame_steps: int64 `[N, K]`, the step index of every frame; `UNUSED`, always behind the used ones, marks a slot that a
            row does not need.
        token_counts: int64 `[N]`, real tokens a row.
        sde_steps: int64 `[N, S]`, the trained steps, ascending.
        log_probs: float32 `[N, S]` under the generating weights, of the stored value (after the round trip through the dtype).
        sigmas: float64 `[N, T + 1]`, the whole schedule of the row.
    """

    latents: torch.Tensor | RaggedLatents = row()
    frame_steps: torch.Tensor = row()
    token_counts: torch.Tensor = row()
    sde_steps: torch.Tensor = row()
    log_probs: torch.Tensor = row()
    sigmas: torch.Tensor = row()

    @property
    def storage(self) -> str:
        """`padded` or `ragged`."""
        return "ragged" if isinstance(self.latents, RaggedLatents) else "padded"

    def frame(self, steps: torch.Tensor) -> torch.Tensor:
        """`[N, seq, C]`: each row's latent at its own step index (`steps` int64 `[N]`); found by index, never by time.

        `seq` is the bound when padded, the longest row when ragged; a shorter row is followed by zeros.
        """
        match = self.frame_steps == steps[:, None]
        if not bool(match.any(dim=1).all()):
            lost = torch.nonzero(~match.any(dim=1)).flatten().tolist()
            raise ValueError(
                f"steps {steps[lost].tolist()} of rows {lost} are not stored; stored: {self.frame_steps[lost].tolist()}"
            )
        slot = match.to(torch.int8).argmax(dim=1)
        if isinstance(self.latents, RaggedLatents):
            return self.latents.frame(slot)
        return self.latents[torch.arange(len(self), device=self.latents.device), slot.to(self.latents.device)]

    def final(self) -> list[torch.Tensor]:
        """The clean latents, one `[seq_i, C]` a row, without padding."""
        last = self.frame(torch.full((len(self),), self.sigmas.shape[1] - 1, dtype=torch.long))
        return [r[0] for r in trim_latents(last[:, None], self.token_counts.tolist())]

    def rows(self) -> list[torch.Tensor]:
        """One `[K_i, seq_i, C]` a row: its used frames without padding."""
        if isinstance(self.latents, RaggedLatents):
            return self.latents.rows()
        used = (self.frame_steps != UNUSED).sum(dim=1).tolist()
        return [
            row[:frames, :tokens]
            for row, frames, tokens in zip(self.latents, used, self.token_counts.tolist(), strict=True)
        ]

    def to_ragged(self) -> LatentSegment:
        """The same rows, packed without padding."""
        if isinstance(self.latents, RaggedLatents):
            return self
        return self.replace(latents=RaggedLatents.pack(self.rows()))

    def trimmed(self) -> LatentSegment:
        """The same rows stored without padding beyond the longest of them."""
        if isinstance(self.latents, RaggedLatents):
            return self
        longest = int(self.token_counts.max())
        return (
            self if longest == self.latents.shape[2] else self.replace(latents=self.latents[:, :, :longest])
        )

    def nbytes(self) -> int:
        """Bytes of the stored frames, padding included."""
        if isinstance(self.latents, RaggedLatents):
            return self.latents.nbytes()
        return self.latents.numel() * self.latents.element_size()

    def stored_tokens(self) -> int:
        """Tokens that a frame of all rows takes up, padding included; the real ones are `token_counts.sum()`."""
        if isinstance(self.latents, RaggedLatents):
            return int(self.latents.num_tokens.sum())
        return len(self) * self.latents.shape[2]

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """The rows of all tables, in order: padded when all are, ragged otherwise."""
        if len({table.storage for table in tables}) > 1:
            tables = [table.to_ragged() for table in tables]  # type: ignore[misc]
        return super().concat(tables)

    @classmethod
    def _concat_column(cls, name: str, parts: list[Any]) -> Any:
        """Groups may keep different numbers of frames: the shorter ones get `UNUSED` slots."""
        if name == "frame_steps":
            most = max(p.shape[1] for p in parts)
            parts = [torch.nn.functional.pad(p, (0, most - p.shape[1]), value=UNUSED) for p in parts]
        if name == "latents":
            if isinstance(parts[0], RaggedLatents):
                return RaggedLatents.concat(parts)
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
        storage: Storage = "padded",
    ) -> LatentSegment:
        """Stores one `[K, seq_i, C]` a row.

        `padded` makes every row `pad_to` tokens long, in one launch; `ragged` packs the used frames of each.
        """
        latents: torch.Tensor | RaggedLatents
        if storage == "ragged":
            used = (frame_steps != UNUSED).sum(dim=1).tolist()
            latents = RaggedLatents.pack([f[:k] for f, k in zip(frames, used, strict=True)])
        else:
            latents = pad_latents(list(frames), pad_to=pad_to)
        return cls(
            latents=latents,
            frame_steps=frame_steps,
            token_counts=torch.tensor([f.shape[1] for f in frames], dtype=torch.int64),
            sde_steps=sde_steps,
            log_probs=log_probs,
            sigmas=sigmas,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by name, for whoever moves the segment; `from_tensors` puts it together again."""
        named: dict[str, torch.Tensor] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, RaggedLatents):
                named.update(
                    {f"{f.name}.{g.name}": getattr(value, g.name) for g in dataclasses.fields(value)}
                )
            else:
                named[f.name] = value
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> LatentSegment:
        """The inverse of `tensors`; copies nothing."""
        columns: dict[str, Any] = {name: t for name, t in tensors.items() if "." not in name}
        packed = {name.split(".")[1]: t for name, t in tensors.items() if "." in name}
        return cls(**columns, latents=RaggedLatents(**packed)) if packed else cls(**columns)


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
