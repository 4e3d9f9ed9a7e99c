# SPDX-License-Identifier: Apache-2.0
"""Frames of rows of any size without padding: one packed array and where each row lies in it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Self

import torch


@dataclasses.dataclass(frozen=True)
class RaggedLatents:
    """The frames of N rows, row by row, frame by frame. A column of rows, as a padded tensor would be.

    Attributes:
        values: `[M, C]`, the tokens of all frames; row i has `num_frames[i] * num_tokens[i]` of them.
        num_frames: int64 `[N]`, frames a row.
        num_tokens: int64 `[N]`, tokens a frame of each row.
    """

    values: torch.Tensor
    num_frames: torch.Tensor
    num_tokens: torch.Tensor

    def __post_init__(self) -> None:
        held = int((self.num_frames * self.num_tokens).sum())
        if held != self.values.shape[0]:
            raise ValueError(
                f"RaggedLatents: the rows have {held} tokens in all; values holds {self.values.shape[0]}"
            )

    def __len__(self) -> int:
        return len(self.num_tokens)

    @classmethod
    def pack(cls, rows: Sequence[torch.Tensor]) -> Self:
        """From one `[K_i, L_i, C]` a row (at least one row)."""
        return cls(
            values=torch.cat([row.reshape(-1, row.shape[-1]) for row in rows]),
            num_frames=torch.tensor([row.shape[0] for row in rows], dtype=torch.int64),
            num_tokens=torch.tensor([row.shape[1] for row in rows], dtype=torch.int64),
        )

    def rows(self) -> list[torch.Tensor]:
        """One `[K_i, L_i, C]` a row: views."""
        sizes = zip(self.num_frames.tolist(), self.num_tokens.tolist(), strict=True)
        pieces = self.values.split((self.num_frames * self.num_tokens).tolist())
        return [piece.view(frames, tokens, -1) for piece, (frames, tokens) in zip(pieces, sizes, strict=True)]

    def select(self, index: torch.Tensor) -> Self:
        """The rows at `index` (int64), in that order; neighbours that stay in order are taken in one piece."""
        offsets = self._offsets()
        runs: list[list[int]] = []
        for row in index.tolist():
            if runs and runs[-1][1] == row:
                runs[-1][1] = row + 1
            else:
                runs.append([row, row + 1])
        pieces = [self.values[offsets[start] : offsets[stop]] for start, stop in runs]
        values = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else self.values[:0]
        return type(self)(values, self.num_frames[index], self.num_tokens[index])

    @classmethod
    def concat(cls, tables: Sequence[Self]) -> Self:
        """The rows of all tables, in order."""
        return cls(
            values=torch.cat([table.values for table in tables]),
            num_frames=torch.cat([table.num_frames for table in tables]),
            num_tokens=torch.cat([table.num_tokens for table in tables]),
        )

    def frame(self, slots: torch.Tensor) -> torch.Tensor:
        """`[N, longest row, C]`: frame `slots[i]` (int64) of each row, zeros behind the shorter ones."""
        starts = torch.tensor(self._offsets()[:-1]) + slots * self.num_tokens
        longest = int(self.num_tokens.max())
        token = torch.arange(longest)
        real = token < self.num_tokens[:, None]
        places = (starts[:, None] + token).clamp_(max=self.values.shape[0] - 1).to(self.values.device)
        found = self.values[places]
        if bool(real.all()):
            return found
        return found.masked_fill(~real[..., None].to(found.device), 0)

    def nbytes(self) -> int:
        """Bytes of the packed values."""
        return self.values.numel() * self.values.element_size()

    def _offsets(self) -> list[int]:
        return [0, *itertools.accumulate((self.num_frames * self.num_tokens).tolist())]
