# SPDX-License-Identifier: Apache-2.0
"""Bitwise mode on one GPU: the same log-prob bits from rollout and replay, whatever the micro size and the neighbours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from unirl.models.bagel import Bagel, BagelStage, preset
from unirl.models.bagel.tokenizer import ByteTokenizer
from unirl.types import NoiseRecipe, Part, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIBLINGS = 5
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def sampled(stage: BagelStage, kind: str, sides: list[list[int]]) -> Part:
    guided = kind != "text"
    params = SamplingParams(
        height=max(sides)[0],
        width=max(sides)[1],
        num_inference_steps=5,
        eta=0.7,
        rule="flow",
        noise=NoiseRecipe(seed=3),
        guidance_scale=2.5 if guided else 1.0,
        cfg_img_scale=1.5 if kind == "edit" else 1.0,
        cfg_renorm_type="channel",
        trajectory_dtype="bfloat16" if stage.model.dtype is torch.bfloat16 else "float32",
    )
    sources = [np.random.default_rng(i).integers(0, 256, (8, 12, 1), dtype=np.uint8) for i in range(3)]
    roots = Part(
        ids=("r0.p0", "r0.p1", "r0.p2"),
        prompts=("a handwritten three", "seven", "somebody's handwritten nine"),
        metadata=tuple({"canvas": side} for side in sides),
        images=tuple(sources) if kind == "edit" else None,
    )
    rows = roots.fork(SIBLINGS, params)
    steps = torch.tensor([[0, 2], [1, 3], [0, 4]]).repeat_interleave(SIBLINGS, dim=0)
    return stage.sample(rows.replace(sde_steps=steps), decode=False)


def assert_replayed_to_the_bit(stage: BagelStage, rows: Part) -> None:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        for size in (1, 4, len(rows)):
            for start in range(0, len(rows), size):
                micro = rows.select(order[start : start + size])
                assert torch.equal(stage.replay(micro).log_probs.cpu(), micro.segment.log_probs)
    row = rows.select([SIBLINGS])
    alone = stage.sample(row.replace(segment=None, fingerprints=None, layouts=None), decode=False)
    assert torch.equal(alone.segment.log_probs, row.segment.log_probs)
    assert torch.equal(alone.segment.final()[0], row.segment.final()[0])


@DTYPES
@pytest.mark.parametrize("kind", ["text", "guided", "edit"])
def test_the_digits_model_replays_its_rollout_to_the_bit(
    random_base: Path, kind: str, dtype: torch.dtype
) -> None:
    stage = BagelStage.from_pretrained(random_base, device="cuda", dtype=dtype)
    assert_replayed_to_the_bit(stage, sampled(stage, kind, [[8, 8], [12, 12], [12, 8]]))


@pytest.mark.parametrize("kind", ["text", "guided"])
def test_two_layers_of_the_large_model_replay_their_rollout_to_the_bit(kind: str) -> None:
    config = preset("bagel-7b-mot").replace(batch_invariant=True)
    config = config.replace(
        language=dataclasses.replace(config.language, num_hidden_layers=2),
        vision=dataclasses.replace(config.vision, num_hidden_layers=1),
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Bagel(config).eval().requires_grad_(False).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "pos_embed" not in name:
            torch.nn.init.normal_(weight, std=0.02) if weight.ndim > 1 else weight.fill_("norm" in name)
    stage = BagelStage(model, codec=None, tokenizer=ByteTokenizer())  # type: ignore[arg-type]
    assert_replayed_to_the_bit(stage, sampled(stage, kind, [[128, 128], [256, 256], [256, 128]]))
