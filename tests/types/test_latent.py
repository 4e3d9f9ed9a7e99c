# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from unirl.types import UNUSED, LatentSegment, SegmentRef, frames_to_keep


def segment(
    steps: list[int], *, rows: int, tokens: int, pad_to: int, total: int = 6, offset: float = 0.0
) -> LatentSegment:
    """Row n's frame of step i holds the value 100 n + i everywhere."""
    kept = frames_to_keep(steps, total)
    frames = [
        torch.stack([torch.full((tokens, 2), offset + 100.0 * n + i) for i in kept]) for n in range(rows)
    ]
    return LatentSegment.pack(
        frames,
        frame_steps=torch.tensor([kept] * rows),
        sde_steps=torch.tensor([steps] * rows),
        log_probs=torch.zeros(rows, len(steps)),
        sigmas=torch.linspace(1, 0, total + 1, dtype=torch.float64).repeat(rows, 1),
        pad_to=pad_to,
    )


def test_every_step_trained_keeps_all_frames() -> None:
    assert frames_to_keep(range(6), 6) == list(range(7))


def test_a_window_keeps_its_frames_and_the_last_one() -> None:
    assert frames_to_keep([3, 4], 9) == [3, 4, 5, 9]


def test_frames_are_found_by_step_index_a_row() -> None:
    stored = segment([1, 4], rows=2, tokens=3, pad_to=5)
    got = stored.frame(torch.tensor([1, 5]))
    assert got[0, :3].unique().tolist() == [1.0] and got[1, :3].unique().tolist() == [105.0]
    assert got[:, 3:].abs().max() == 0


def test_a_step_that_is_not_stored_is_named() -> None:
    with pytest.raises(ValueError, match=r"steps \[3\] of rows \[1\] are not stored"):
        segment([0], rows=2, tokens=3, pad_to=3).frame(torch.tensor([1, 3]))


def test_segments_of_different_step_sets_and_bounds_concatenate() -> None:
    both = LatentSegment.concat(
        [segment([2, 3], rows=1, tokens=3, pad_to=4), segment([0, 4], rows=1, tokens=2, pad_to=6, offset=0.5)]
    )
    assert both.latents.shape == (2, 5, 6, 2)
    assert both.frame_steps.tolist() == [[2, 3, 4, 6, UNUSED], [0, 1, 4, 5, 6]]
    assert [f.shape[0] for f in both.final()] == [3, 2]
    assert both.final()[1].unique().tolist() == [6.5]


def test_references_move_no_data_and_resolve_to_the_rows_in_order() -> None:
    stored = {
        "a": segment([0], rows=3, tokens=2, pad_to=2),
        "b": segment([0], rows=2, tokens=2, pad_to=2, offset=0.5),
    }
    refs = SegmentRef.concat([SegmentRef.of("a", 3), SegmentRef.of("b", 2)]).select([4, 0, 2, 3])
    assert refs.objects() == ["b", "a"]
    assert [float(r[0, 0]) for r in refs.resolve(stored).final()] == [106.5, 6.0, 206.0, 6.5]
