# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of both sides: silence when equal, a table when not."""

from __future__ import annotations

import pickle

import pytest
import torch

from unirl.parity import LayoutMismatch, compare, mismatching_rows

IDS = ["r0.p0/0", "r0.p0/1", "r0.p1/0"]


def _digests() -> torch.Tensor:
    return torch.tensor([[1, 2], [3, 4], [5, -6]])


def test_equal_digests_pass_in_silence():
    assert compare(_digests(), _digests(), IDS) is None


@pytest.mark.parametrize("word", [0, 1])
def test_one_bit_in_either_word_is_found(word):
    other = _digests()
    other[1, word] ^= 1 << 40
    assert mismatching_rows(_digests(), other).tolist() == [False, True, False]
    with pytest.raises(
        LayoutMismatch, match=r"1 of 3 rows.*\n.*row.*worker.*trainer\n.*r0\.p0/1.*fingerprint"
    ) as caught:
        compare(_digests(), other, IDS)
    assert caught.value.ids == ("r0.p0/1",)


def test_fields_are_named_with_both_values():
    other = _digests() + torch.tensor([[0, 0], [0, 0], [1, 0]])
    worker = [{}, {}, {"kv_len": 12, "token_ids": (5, 6, 7), "canvas": (8, 16), "positions": [1, 2]}]
    trainer = [{}, {}, {"kv_len": 13, "token_ids": (5, 9, 7), "canvas": (8, 16), "positions": [1, 2, 3]}]
    with pytest.raises(LayoutMismatch) as caught:
        compare(_digests(), other, IDS, worker_fields=worker, trainer_fields=trainer)
    lines = [line.split() for line in str(caught.value).splitlines()[1:]]
    assert lines == [
        ["row", "field", "worker", "trainer"],
        ["r0.p1/0", "kv_len", "12", "13"],
        ["r0.p1/0", "token_ids[1]", "6", "9"],
        ["r0.p1/0", "len(positions)", "2", "3"],
    ]


def test_field_that_only_one_side_has_is_named():
    with pytest.raises(LayoutMismatch, match=r"source_pixels\s+\(none\)\s+7"):
        compare(
            _digests()[:1],
            _digests()[1:2],
            IDS[:1],
            worker_fields=[{}],
            trainer_fields=[{"source_pixels": 7}],
        )


def test_missing_fingerprint_is_an_error_unless_not_required():
    with pytest.raises(LayoutMismatch, match=r"the rollout worker.*parity\.require_fingerprint"):
        compare(None, _digests(), IDS)
    with pytest.raises(LayoutMismatch, match="the rollout worker and the trainer"):
        compare(None, None, IDS)
    assert compare(None, _digests(), IDS, require=False) is None


def test_long_lists_of_rows_are_cut_and_counted():
    worker, trainer = torch.zeros(20, 2, dtype=torch.int64), torch.ones(20, 2, dtype=torch.int64)
    with pytest.raises(LayoutMismatch, match=r"20 of 20 rows[\s\S]*and 12 more rows"):
        compare(worker, trainer, [f"r0.p0/{i}" for i in range(20)])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[N, 2\]"):
        mismatching_rows(torch.zeros(3, 2), torch.zeros(2, 2))


def test_pixel_digests_are_told_in_hexadecimal_by_image():
    with pytest.raises(LayoutMismatch, match=r"gen\.source_pixels\[1\] +0{15}3f{16} +0{15}30{15}4"):
        compare(
            _digests()[:1],
            _digests()[1:2],
            IDS[:1],
            worker_fields=[{"gen.source_pixels": [1, 2, 3, -1]}],
            trainer_fields=[{"gen.source_pixels": [1, 2, 3, 4]}],
        )


def test_a_field_of_one_value_is_told_without_an_index():
    with pytest.raises(
        LayoutMismatch, match=r"gen\.kv_len +7 +8\n +r0\.p0/0 +len\(ids\) +2 +3\n +r0\.p0/0 +ids\[1\] +5 +6"
    ):
        compare(
            _digests()[:1],
            _digests()[1:2],
            IDS[:1],
            worker_fields=[{"gen.kv_len": [7], "ids": [4, 5]}],
            trainer_fields=[{"gen.kv_len": [8], "ids": [4, 6, 7]}],
        )


def test_error_travels_between_processes_with_its_rows():
    error = LayoutMismatch("text", ["a"])
    back = pickle.loads(pickle.dumps(error))
    assert (str(back), back.ids) == ("text", ("a",))
