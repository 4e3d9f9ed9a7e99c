# SPDX-License-Identifier: Apache-2.0
"""Worker and trainer are compared by what each really gave its transformer, and a difference is told by field."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from unirl.config import RunConfig, parse
from unirl.distributed.collective import LocalCollective
from unirl.models.bagel import Bagel, BagelStage, context, source
from unirl.models.bagel import stage as stage_module
from unirl.parity import LayoutMismatch
from unirl.train.plan import plan_updates
from unirl.train.stack import TrainStack
from unirl.train.trainable import prepare
from unirl.types import LayoutRecord, NoiseRecipe, Part, SamplingParams

# Both guidances are on, so all three contexts are built.
PARAMS = SamplingParams(
    height=8,
    width=12,
    num_inference_steps=3,
    eta=0.8,
    rule="flow",
    noise=NoiseRecipe(seed=5),
    guidance_scale=2.0,
    cfg_img_scale=1.5,
)
CONTEXTS = ("gen", "cfg_text", "cfg_img")
CONTEXT_FIELDS = ("kv_len", "rope_offset", "token_ids", "position_ids", "image_shapes", "source_pixels")
FIELDS = [
    *(f"{name}.{field}" for name in CONTEXTS for field in CONTEXT_FIELDS),
    "canvas",
    "seq_len",
    "marker_ids",
    "latent_position_ids",
]


class Sides:
    """One model that generates and trains, and rows that it has generated."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        config = parse(RunConfig, {"model": {"lora": {"rank": 2, "alpha": 2}}})
        self.stage = BagelStage.from_pretrained(folder)
        prepare(self.stage.model, config.model, seed=0)
        self.train_stack = TrainStack(self.stage, self.stage.model, config, LocalCollective())
        roots = Part(
            ids=("r0.p0", "r0.p1"),
            prompts=("make it the digit three", "make it the digit four"),
            metadata=({"canvas": [8, 12]},) * 2,
            images=tuple(
                np.random.default_rng(seed).integers(0, 256, (9, 14, 1), dtype=np.uint8) for seed in (0, 1)
            ),
        )
        rows = roots.fork(2, PARAMS).replace(sde_steps=torch.tensor([[0, 1]] * 4))
        ones = torch.ones(4, dtype=torch.int64)
        self.rows = self.stage.sample(rows, decode=False).replace(
            advantages=torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64),
            push_version=0 * ones,
            policy_step=0 * ones,
        )

    def train(self, rows: Part) -> None:
        plan = plan_updates(rows.group_ids, rows.canvases(), [1.0] * 4, 1, 1, 4).for_rank(0)
        self.train_stack.train(rows.select(plan.rows), plan)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.train_stack.parameters.values()]


@pytest.fixture(scope="module")
def sides(random_base: Path) -> Sides:
    """Shared: a mismatch leaves the trainer as it was, which every test checks."""
    return Sides(random_base)


def mismatch(sides: Sides, rows: Part | None = None) -> list[list[str]]:
    """Lines (row, field, worker, trainer) of the error that training must end in before it takes a step."""
    before = sides.weights()
    with pytest.raises(LayoutMismatch) as caught:
        sides.train(sides.rows if rows is None else rows)
    assert all(torch.equal(a, b) for a, b in zip(before, sides.weights(), strict=True))
    assert sides.train_stack.policy_step == 0
    head, *lines = str(caught.value).splitlines()[1:]
    assert head.split() == ["row", "field", "worker", "trainer"]
    return [re.split(r" {2,}", line.strip()) for line in lines]


def test_equal_sides_pass(random_base: Path) -> None:
    sides = Sides(random_base)
    sides.train(sides.rows)
    assert sides.train_stack.policy_step == 1


def test_all_three_contexts_are_recorded(sides: Sides) -> None:
    assert list(sides.rows.layouts[0].fields()) == FIELDS
    assert (
        sides.rows.layouts[0] is sides.rows.layouts[1] and sides.rows.layouts[1] is not sides.rows.layouts[2]
    )


@pytest.mark.parametrize("field", FIELDS)
def test_any_one_value_that_differs_is_named_with_both_sides_values(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    honest = stage_module.group_layout
    told: dict[str, int] = {}

    def changed(contexts: Any, group: int, **given: Any) -> LayoutRecord:
        record = honest(contexts, group, **given)
        if group != 1:
            return record
        fields = {n: torch.tensor(v, dtype=torch.int64) for n, v in record.fields().items()}
        if fields[field].numel() == 0:  # text alone has no image: the other side has one too many
            fields[field] = torch.tensor([41])
        else:
            told["worker"] = int(fields[field][-1])
            fields[field][-1] += 1
        return LayoutRecord.of(fields)

    monkeypatch.setattr(stage_module, "group_layout", changed)
    lines = mismatch(sides)
    assert {line[0] for line in lines} == {"r0.p1/0", "r0.p1/1"}
    assert all(field in line[1] for line in lines)
    if told and "source_pixels" not in field:
        assert lines[0][2:] == [str(told["worker"]), str(told["worker"] + 1)]
    elif told:
        assert all(re.fullmatch(r"[0-9a-f]{32}", value) for value in lines[0][2:])
    else:
        assert lines[0][1:] == [f"len({field})", "0", "1"]


# ---- the trainer's side really feeds something else


def feeding(kind: str, change: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """`_embed` that changes what the blocks of one kind are given; `change(fed, number of blocks before)`."""
    honest = context._embed

    def embed(model: Bagel, number: int, blocks: list[Any], requests: list[Any]) -> Any:
        fed = honest(model, number, blocks, requests)
        return change(fed, number) if blocks[0].kind == kind else fed

    return embed


@pytest.mark.parametrize(
    ("kind", "contexts"),
    [("text", {"gen", "cfg_img"}), ("vae", {"gen", "cfg_text"}), ("vit", {"gen", "cfg_text"})],
)
@pytest.mark.parametrize("field", ["token_ids", "position_ids"])
def test_another_token_or_position_in_a_prefix(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, kind: str, contexts: set[str], field: str
) -> None:
    def change(fed: Any, number: int) -> Any:
        name = "ids" if field == "token_ids" else "positions"
        changed = getattr(fed, name).clone()
        changed[..., 0] += 1
        return fed._replace(**{name: changed})

    monkeypatch.setattr(context, "_embed", feeding(kind, change))
    lines = mismatch(sides)
    assert {line[1].split(".")[0] for line in lines} == contexts
    assert all(
        re.match(rf"\w+\.{field}\[\d+\]", line[1]) and int(line[3]) == int(line[2]) + 1 for line in lines
    )


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("field", ["kv_len", "rope_offset"])
def test_a_prefix_that_is_cut_or_followed_at_another_position(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, name: str, field: str
) -> None:
    honest = stage_module.build_contexts

    def build(*given: Any) -> Any:
        built = dict(honest(*given).by_name)
        one = built[name]
        if field == "kv_len":
            shorter = [type(layer)(layer.key[:, :, 1:], layer.value[:, :, 1:]) for layer in one.layers]
            lengths = None if one.prefix_lengths is None else one.prefix_lengths - 1
            one = dataclasses.replace(one, layers=shorter, prefix_lengths=lengths)
        else:
            one = dataclasses.replace(one, rope_offsets=one.rope_offsets + 1)
        return context.Contexts({**built, name: one})

    monkeypatch.setattr(stage_module, "build_contexts", build)
    lines = mismatch(sides)
    assert {line[1] for line in lines} == {f"{name}.{field}"}
    step = -1 if field == "kv_len" else 1
    assert all(int(line[3]) == int(line[2]) + step for line in lines)


def test_another_marker_around_the_latents(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = sides.stage.model.config.tokens
    monkeypatch.setattr(
        Bagel,
        "marker_ids",
        property(lambda model: torch.tensor([tokens.start_of_image, tokens.eos_token_id])),
    )
    lines = mismatch(sides)
    assert {tuple(line[1:]) for line in lines} == {
        ("marker_ids[1]", str(tokens.end_of_image), str(tokens.eos_token_id))
    }


def test_another_latent_position(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = stage_module.plan_batches

    def plan(*given: Any) -> Any:
        return [dataclasses.replace(batch, positions=batch.positions.flip(0)) for batch in honest(*given)]

    monkeypatch.setattr(stage_module, "plan_batches", plan)
    assert {line[1] for line in mismatch(sides)} == {"latent_position_ids[0]"}


def test_another_canvas_of_as_many_tokens(sides: Sides) -> None:
    lines = mismatch(sides, sides.rows.replace(metadata=({"canvas": [12, 8]},) * 4))
    assert ["canvas[0]", "8", "12"] in [line[1:] for line in lines]
    assert any(line[1].startswith("latent_position_ids[") for line in lines)


@pytest.mark.parametrize("reader", ["vae", "vit"])
def test_source_image_resized_with_another_interpolation_to_the_same_size(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    honest = source._resized
    calls: list[int] = []

    def resized(picture: Image.Image, size: tuple[int, int], channels: int) -> Tensor:
        calls.append(len(calls))
        if (len(calls) % 2 == 1) == (reader == "vae"):  # the VAE's pixels are made before the ViT's
            picture = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return honest(picture, size, channels)

    monkeypatch.setattr(source, "_resized", resized)
    lines = mismatch(sides)
    index = 0 if reader == "vae" else 1
    assert {line[1] for line in lines} == {f"{name}.source_pixels[{index}]" for name in ("gen", "cfg_text")}
    assert all(line[2] != line[3] and len(line[2]) == len(line[3]) == 32 for line in lines)


def test_one_pixel_of_the_source_image(sides: Sides) -> None:
    touched = [image.copy() for image in sides.rows.images]
    touched[0][3, 4, 0] ^= 255
    touched[1] = touched[0]
    lines = mismatch(sides, sides.rows.replace(images=tuple(touched)))
    assert {line[0] for line in lines} == {"r0.p0/0", "r0.p0/1"}
    assert {line[1].split(".")[1].split("[")[0] for line in lines} == {"source_pixels"}


def test_a_prompt_normalised_on_one_side_only(sides: Sides) -> None:
    lines = mismatch(
        sides, sides.rows.replace(prompts=tuple(p.replace("the ", "") for p in sides.rows.prompts))
    )
    told = {line[1]: (line[2], line[3]) for line in lines}
    assert int(told["gen.kv_len"][0]) - int(told["gen.kv_len"][1]) == len("the ")
    assert "len(gen.token_ids)" in told and "cfg_img.rope_offset" in told and "cfg_text.kv_len" not in told


def test_a_capitalised_prompt_is_told_by_its_token(sides: Sides) -> None:
    lines = mismatch(sides, sides.rows.replace(prompts=tuple(p.capitalize() for p in sides.rows.prompts)))
    # Two markers a source image and bos stand before the prompt's first byte in the generation context.
    assert ["gen.token_ids[5]", str(ord("m")), str(ord("M"))] in [line[1:] for line in lines]
    assert ["cfg_img.token_ids[1]", str(ord("m")), str(ord("M"))] in [line[1:] for line in lines]


def test_a_worker_that_sends_digests_only_is_told_by_digest(sides: Sides) -> None:
    rows = sides.rows.replace(layouts=None, prompts=tuple(p.capitalize() for p in sides.rows.prompts))
    lines = mismatch(sides, rows)
    assert {line[1] for line in lines} == {"fingerprint"} and len(lines) == 4
