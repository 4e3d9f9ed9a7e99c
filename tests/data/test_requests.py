# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from unirl.config import DatasetConfig
from unirl.data import build_eval_request, build_request, load_dataset
from unirl.types import STREAM_EVAL, Canvas, NoiseRecipe, Sample, SamplingParams


def _params(stream=0):
    return SamplingParams(
        height=12,
        width=12,
        num_inference_steps=14,
        eta=1.0,
        rule="flow",
        noise=NoiseRecipe(seed=0, stream=stream),
    )


def test_row_ids_are_rollout_prompt_sibling_and_unique_even_for_a_repeated_row():
    dataset = load_dataset(DatasetConfig(name="digits"))
    request = build_request(dataset, [5, 5, 2], rollout_id=7, siblings=2, params=_params())
    assert request.parts[0].ids == ("r7.p0", "r7.p1", "r7.p2")
    frontier = request.frontier
    assert frontier.ids == ("r7.p0/0", "r7.p0/1", "r7.p1/0", "r7.p1/1", "r7.p2/0", "r7.p2/1")
    assert frontier.group_ids == ["r7.p0", "r7.p0", "r7.p1", "r7.p1", "r7.p2", "r7.p2"]
    assert frontier.prompts == tuple(dataset[i].prompt for i in (5, 5, 5, 5, 2, 2))
    assert frontier.images is None


def test_eval_ids_are_dataset_rows_however_the_evaluation_is_cut():
    dataset = load_dataset(DatasetConfig(name="digits_heldout"))
    params = _params(STREAM_EVAL)
    whole = build_eval_request(dataset, range(10), 2, params)
    halves = [build_eval_request(dataset, rows, 2, params) for rows in (range(5), range(5, 10))]
    assert Sample.concat(halves).frontier.ids == whole.frontier.ids
    assert whole.frontier.ids[:3] == ("eval.p0/0", "eval.p0/1", "eval.p1/0")
    with pytest.raises(ValueError, match="not unique"):
        build_eval_request(dataset, [1, 1], 2, params)


def test_canvas_of_a_row_comes_from_its_metadata():
    dataset = load_dataset(DatasetConfig(name="digits_mixed"))
    request = build_request(dataset, [0, 1, 2], rollout_id=0, siblings=1, params=_params())
    assert request.canvases() == [Canvas(8, 8), Canvas(12, 12), Canvas(12, 8)]


def test_a_dataset_with_images_has_the_column_in_every_request(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "plain"}\n{"prompt": "edit", "image": "x.png"}\n')
    from PIL import Image

    Image.new("L", (6, 4), 200).save(tmp_path / "x.png")
    dataset = load_dataset(DatasetConfig(path=str(path)))
    plain, edit = (build_request(dataset, [i], rollout_id=i, siblings=2, params=_params()) for i in (0, 1))
    images = Sample.concat([plain, edit]).frontier.images
    assert images[:2] == (None, None)
    assert images[2].shape == (4, 6, 1) and int(images[3][0, 0, 0]) == 200
