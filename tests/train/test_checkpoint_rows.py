# SPDX-License-Identifier: Apache-2.0
"""Rows that wait in a buffer, through a checkpoint and back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import linear_stage as small
import numpy as np
import pytest
import torch

from unirl.train.checkpoint import load_checkpoint, save_checkpoint
from unirl.train.checkpoint_rows import columns_from_tensors, columns_to_tensors
from unirl.types import Canvas, Part, Sample


def assert_equal(left, right, path: str = "") -> None:
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, path
        assert torch.equal(torch.nan_to_num(left.double()), torch.nan_to_num(right.double())), path
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype and np.array_equal(left, right), path
    elif dataclasses.is_dataclass(left):
        for f in dataclasses.fields(left):
            assert_equal(getattr(left, f.name), getattr(right, f.name), f"{path}.{f.name}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, pair in enumerate(zip(left, right, strict=True)):
            assert_equal(*pair, f"{path}.{i}")
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}.{key}")
    else:
        assert left == right or (left != left and right != right), path


def _sample() -> Sample:
    part = small.batch(small.LinearStage(small.LinearPolicy()), canvases=((2, 2), (2, 4)))
    rewards = part.rewards.clone()
    rewards[1] = math.nan
    part = part.replace(
        rewards=rewards,
        images=(np.arange(12, dtype=np.uint8).reshape(2, 2, 3), *([None] * (len(part) - 1))),
        component_rewards={"quality": rewards, "size": rewards * 2},
        metadata=tuple({**m, "tags": ["a", 1, 0.1, None], "score": math.inf} for m in part.metadata),
        segment=part.segment.replace(latents=part.segment.latents.bfloat16()),
    )
    groups = list(dict.fromkeys(part.group_ids))
    roots = Part(ids=tuple(groups), prompts=("a word",) * len(groups), metadata=({},) * len(groups))
    return Sample((roots, part))


def test_groups_come_back_to_the_bit_with_versions_and_log_probs(tmp_path: Path):
    buffered = [_sample(), _sample()]
    tensors, description = columns_to_tensors(buffered, "buffer")
    path = save_checkpoint(tmp_path, 1, {"buffer": tensors}, {"buffer": description})
    read = load_checkpoint(path)
    assert_equal(columns_from_tensors(read.state["buffer"], read.sections["buffer"]), buffered)


def test_description_is_json_and_canvases_keep_their_type():
    value = {"canvas": Canvas(8, 16), "pair": (1, 2), "list": [1.5], "flag": True, "number": np.float32(0.5)}
    tensors, description = columns_to_tensors(value, "x")
    back = columns_from_tensors(json.loads(json.dumps(description, allow_nan=False)), tensors)
    assert_equal(back, {**value, "number": 0.5})


def test_view_of_read_only_memory_is_saved():
    array = np.frombuffer(bytes(range(8)), dtype=np.uint8)
    tensors, description = columns_to_tensors([array], "x")
    assert np.array_equal(columns_from_tensors(description, tensors)[0], array)


def test_what_cannot_be_saved_is_named_by_its_path():
    with pytest.raises(ValueError, match=r"rows\.0\.extra is a object"):
        columns_to_tensors([{"extra": object()}], "rows")
    with pytest.raises(ValueError, match=r"rows: key 3"):
        columns_to_tensors({3: "x"}, "rows")


def test_file_from_a_stranger_builds_rows_and_nothing_else():
    with pytest.raises(ValueError, match="hold a 'Popen'; allowed: Part"):
        columns_from_tensors({"kind": "Popen", "of": [["args", "true"]]}, {})
