# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

from unirl.types import Canvas, NoiseRecipe, Part, Sample, SamplingParams, check_canvases


def params(**changes: object) -> SamplingParams:
    values = {
        "height": 8,
        "width": 8,
        "num_inference_steps": 4,
        "eta": 0.7,
        "rule": "flow",
        "noise": NoiseRecipe(0),
    }
    return SamplingParams(**(values | changes))  # type: ignore[arg-type]


def prompts(count: int, **metadata: object) -> Part:
    return Part(
        ids=tuple(f"r0.p{i}" for i in range(count)),
        prompts=tuple(f"prompt {i}" for i in range(count)),
        metadata=tuple(dict(metadata) for _ in range(count)),
        params=params(),
    )


def test_siblings_are_named_after_their_parent_and_carry_its_prompt() -> None:
    sample = Sample((prompts(2),)).fork(3, params())
    assert sample.frontier.ids == ("r0.p0/0", "r0.p0/1", "r0.p0/2", "r0.p1/0", "r0.p1/1", "r0.p1/2")
    assert sample.frontier.group_ids == ["r0.p0"] * 3 + ["r0.p1"] * 3
    assert sample.frontier.prompts[4] == "prompt 1"


def test_split_and_concat_are_inverses() -> None:
    sample = Sample((prompts(3),)).fork(2, params())
    trees = sample.split()
    assert [t.group_id for t in trees] == ["r0.p0", "r0.p1", "r0.p2"]
    assert Sample.concat(trees) == sample


def test_split_finds_children_by_id_where_rows_are_shuffled() -> None:
    sample = Sample((prompts(2),)).fork(2, params())
    shuffled = sample.replace_frontier(sample.frontier.select([3, 0, 2, 1]))
    assert [t.frontier.ids for t in shuffled.split()] == [("r0.p0/0", "r0.p0/1"), ("r0.p1/1", "r0.p1/0")]


def test_concatenating_parts_of_different_params_names_the_field() -> None:
    left = prompts(1)
    right = left.replace(ids=("r1.p0",), params=params(eta=0.5))
    with pytest.raises(ValueError, match="shared field 'params' differs"):
        Part.concat([left, right])


def test_a_column_missing_from_one_table_is_an_error() -> None:
    left = prompts(1).replace(rewards=torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="column 'rewards' is missing from some"):
        Part.concat([left, prompts(1).replace(ids=("r1.p0",))])


def test_columns_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        prompts(2).replace(rewards=torch.zeros(3, dtype=torch.float64))


def test_a_row_without_a_parent_is_an_error() -> None:
    child = prompts(1).replace(ids=("r9.p9/0",))
    with pytest.raises(ValueError, match=r"no parent above them: \['r9.p9'\]"):
        Sample((prompts(1), child))


def test_ids_must_be_unique() -> None:
    with pytest.raises(ValueError, match="not unique"):
        Sample((prompts(2).replace(ids=("r0.p0", "r0.p0")),))


def test_nothing_is_sharded_because_its_length_happens_to_equal_the_batch() -> None:
    part = prompts(5).replace(params=params(cfg_interval=(0.4, 1.0)))
    assert part.select([0, 1]).params is part.params


def test_canvases_come_from_metadata_and_default_to_the_params() -> None:
    part = Part.concat([prompts(1, canvas=[4, 6]), prompts(1).replace(ids=("r1.p0",))])
    assert part.canvases() == [Canvas(4, 6), Canvas(8, 8)]


@pytest.mark.parametrize("bad", [[8], [8, 0], [8.0, 8], "8x8", [True, 8]])
def test_a_malformed_canvas_names_the_row(bad: object) -> None:
    with pytest.raises(ValueError, match=r"row 'r0.p0'.*\[height, width\]"):
        prompts(1, canvas=bad).canvases()


@pytest.mark.parametrize(
    ("canvas", "reason"),
    [
        ((9, 8), "pixel stride 2"),
        ((18, 2), "position table has 8"),
        ((10, 8), r"storage bound.*\[8, 8\] has 16"),
    ],
)
def test_a_canvas_the_model_cannot_hold_names_row_canvas_and_bound(
    canvas: tuple[int, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"row 'a': canvas \[{canvas[0]}, {canvas[1]}\].*{reason}"):
        check_canvases(["a"], [Canvas(*canvas)], Canvas(8, 8), pixel_stride=2, max_side=8)


def test_noise_keys_depend_on_stream_and_row_alone() -> None:
    ids = ("r0.p0/0", "r0.p0/1", "r1.p0/0")
    train, evaluation = NoiseRecipe(0).initial_keys(ids), NoiseRecipe(0, stream=1).initial_keys(ids)
    assert len({*train.tolist(), *evaluation.tolist()}) == 6
    assert torch.equal(NoiseRecipe(0).initial_keys(ids[::-1]), train.flip(0))


def test_init_same_noise_shares_the_initial_latent_of_a_group_only() -> None:
    recipe = NoiseRecipe(0, init_same_noise=True)
    ids = ("r0.p0/0", "r0.p0/1", "r1.p0/0")
    assert len(set(recipe.initial_keys(ids).tolist())) == 2
    assert len(set(recipe.step_keys(ids).tolist())) == 3
