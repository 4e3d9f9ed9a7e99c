# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from unirl.types import UNUSED, LatentSegment, RaggedLatents, SegmentRef, frames_to_keep


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


# ---- both storages behind one interface


def mixed_rows(storage: str, dtype: torch.dtype = torch.float32) -> LatentSegment:
    """Four rows of 6, 3, 6 and 1 tokens, the second with one trained step less."""
    generator = torch.Generator().manual_seed(0)
    counts, kept = [6, 3, 6, 1], [[0, 1, 2, 5], [2, 3, 5, UNUSED], [1, 2, 3, 5], [0, 1, 2, 5]]
    frames = [torch.randn(4, count, 3, generator=generator).to(dtype) for count in counts]
    frames[1][3] = 0
    return LatentSegment.pack(
        frames,
        frame_steps=torch.tensor(kept),
        sde_steps=torch.tensor([[0, 1], [2, 2], [1, 2], [0, 1]]),
        log_probs=torch.arange(8, dtype=torch.float32).reshape(4, 2),
        sigmas=torch.linspace(1, 0, 6, dtype=torch.float64).repeat(4, 1),
        pad_to=8,
        storage=storage,
    )


def assert_same_rows(left: LatentSegment, right: LatentSegment) -> None:
    assert len(left) == len(right)
    for a, b in zip(left.rows(), right.rows(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(left.final(), right.final(), strict=True))
    for name in ("token_counts", "sde_steps", "log_probs", "sigmas"):
        assert torch.equal(getattr(left, name), getattr(right, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 0], [1, 2], [2, 1, 1], [0, 1, 3], []], ids=str)
def test_both_storages_hold_the_same_rows_under_any_selection(index: list[int], dtype: torch.dtype) -> None:
    padded, ragged = (mixed_rows(storage, dtype).select(index) for storage in ("padded", "ragged"))
    assert (padded.storage, ragged.storage) == ("padded", "ragged")
    assert len(padded) == len(ragged) == len(index)
    if index:
        assert_same_rows(padded, ragged)
        assert torch.equal(padded.frame_steps, ragged.frame_steps)


@pytest.mark.parametrize("storage", ["padded", "ragged"])
def test_a_frame_is_followed_by_zeros_in_either_storage(storage: str) -> None:
    segment = mixed_rows(storage)
    got = segment.frame(torch.tensor([1, 3, 2, 0]))
    slots = [1, 1, 1, 0]
    for row, (whole, slot) in enumerate(zip(segment.rows(), slots, strict=True)):
        tokens = whole.shape[1]
        assert torch.equal(got[row, :tokens], whole[slot]) and not got[row, tokens:].any()
    with pytest.raises(ValueError, match=r"steps \[0, 0\] of rows \[1, 2\] are not stored"):
        segment.frame(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("kinds", [("padded", "ragged"), ("ragged", "padded"), ("ragged", "ragged")], ids=str)
def test_segments_of_either_storage_concatenate(kinds: tuple[str, str]) -> None:
    pieces = [mixed_rows(kind).select(index) for kind, index in zip(kinds, ([3, 1], [0, 2]), strict=True)]
    joined = LatentSegment.concat(pieces)
    assert joined.storage == "ragged"
    assert_same_rows(joined, mixed_rows("padded").select([3, 1, 0, 2]))


def test_ragged_segments_of_different_step_sets_concatenate() -> None:
    """Their numbers of frame slots differ; the packed values have none to spare."""
    one = segment([2, 3], rows=1, tokens=3, pad_to=4).to_ragged()
    other = segment([0, 4], rows=1, tokens=2, pad_to=6, offset=0.5).to_ragged()
    both = LatentSegment.concat([one, other])
    assert both.frame_steps.tolist() == [[2, 3, 4, 6, UNUSED], [0, 1, 4, 5, 6]]
    assert both.stored_tokens() == 5 and both.nbytes() == (4 * 3 + 5 * 2) * 2 * 4
    assert both.final()[1].unique().tolist() == [6.5]


@pytest.mark.parametrize("storage", ["padded", "ragged"])
def test_a_segment_is_its_tensors(storage: str) -> None:
    original = mixed_rows(storage)
    again = LatentSegment.from_tensors(original.tensors())
    assert again.storage == storage and torch.equal(again.frame_steps, original.frame_steps)
    assert_same_rows(original, again)


def test_padding_of_the_mix_of_512_768_and_1024_square_outputs() -> None:
    """8 ranks x 4 groups, 23 at 512 x 512, 5 at 768 x 768, 4 at 1024 x 1024: 1024, 2304 and 4096 tokens."""
    counts = [1024] * 23 + [2304] * 5 + [4096] * 4
    rows = {
        storage: LatentSegment.pack(
            [torch.zeros(1, count, 1, dtype=torch.bfloat16) for count in counts],
            frame_steps=torch.tensor([[1]] * 32),
            sde_steps=torch.zeros(32, 0, dtype=torch.int64),
            log_probs=torch.zeros(32, 0),
            sigmas=torch.tensor([[1.0, 0.0]] * 32, dtype=torch.float64),
            pad_to=4096,
            storage=storage,
        )
        for storage in ("padded", "ragged")
    }
    assert int(rows["padded"].token_counts.sum()) == 51_456
    assert rows["padded"].stored_tokens() == 131_072 and rows["ragged"].stored_tokens() == 51_456
    assert rows["padded"].nbytes() / rows["ragged"].nbytes() == pytest.approx(2.547, abs=5e-4)


def test_packed_values_that_do_not_fit_their_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="the rows have 6 tokens in all; values holds 5"):
        RaggedLatents(torch.zeros(5, 2), torch.tensor([1, 2]), torch.tensor([2, 2]))
