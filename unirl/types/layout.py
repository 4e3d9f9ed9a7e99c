# SPDX-License-Identifier: Apache-2.0
"""What a transformer was given for a row, as named integers: what a fingerprint is the digest of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from unirl.ops import layout_digest


@dataclasses.dataclass(frozen=True)
class LayoutRecord:
    """Named runs of integers in one tensor. The siblings of a group share one record.

    Attributes:
        names: F field names.
        words: int64 `[F + M]`: the fields' lengths, then their M values, field by field. With the lengths in
            front a value cannot move from one field to the next unseen.
    """

    names: tuple[str, ...]
    words: torch.Tensor

    @classmethod
    def of(cls, fields: Mapping[str, torch.Tensor]) -> LayoutRecord:
        """A record of int64 `[n]` tensors of one device; nothing is read back to the host."""
        values = list(fields.values())
        lengths = torch.tensor([value.shape[0] for value in values], dtype=torch.int64)
        device = values[0].device if values else lengths.device
        return cls(tuple(fields), torch.cat([lengths.to(device, non_blocking=True), *values]))

    def fields(self) -> dict[str, list[int]]:
        """The values by name, read back to the host."""
        words = self.words.tolist()
        found: dict[str, list[int]] = {}
        start = len(self.names)
        for name, length in zip(self.names, words[:start], strict=True):
            found[name] = words[start : start + length]
            start += length
        return found


def fingerprints_of(records: Sequence[LayoutRecord]) -> torch.Tensor:
    """The records' 128-bit digests, int64 `[len(records), 2]` on their device, without waiting for it."""
    offsets = [0]
    for record in records:
        offsets.append(offsets[-1] + record.words.shape[0])
    return layout_digest(torch.cat([record.words for record in records]), offsets)


def to_host(records: Sequence[LayoutRecord]) -> list[LayoutRecord]:
    """The records with their words on the CPU, moved there in one copy."""
    if not records:
        return []
    words = torch.cat([record.words for record in records]).cpu()
    pieces = words.split([record.words.shape[0] for record in records])
    # A view would keep, and pickle, the words of all groups.
    return [LayoutRecord(record.names, piece.clone()) for record, piece in zip(records, pieces, strict=True)]
