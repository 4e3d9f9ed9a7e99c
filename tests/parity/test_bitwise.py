# SPDX-License-Identifier: Apache-2.0
"""Bitwise mode: rollout and replay give the same log-prob bits, whatever the micro size and the neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unirl.config import RunConfig, check, parse
from unirl.distributed import models
from unirl.distributed.collective import LocalCollective
from unirl.models.bagel import BagelStage, preset
from unirl.models.bagel.layers import Linear, RMSNorm
from unirl.train.plan import plan_updates
from unirl.train.stack import TrainStack, merge_results
from unirl.train.trainable import is_bitwise, prepare
from unirl.types import NoiseRecipe, Part, SamplingParams

CANVASES = ([8, 8], [12, 12], [12, 8])
SIBLINGS = 5
RECIPE: dict[str, Any] = {
    "parity": {"bitwise": True},
    "model": {"lora": {"rank": 4, "alpha": 4}},
    "sampling": {"height": 12, "width": 12},
    "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
    "buffer_max_staleness": 1,
}


@pytest.fixture
def stack(random_base: Path) -> TrainStack:
    torch.set_num_threads(1)
    config = parse(RunConfig, RECIPE)
    stage = BagelStage.from_pretrained(random_base)
    prepare(stage.model, config.model, seed=0)
    return TrainStack(stage, stage.model, config, LocalCollective())


def rollout(stack: TrainStack, kind: str, *, eta: float = 0.8, siblings: int = SIBLINGS) -> Part:
    """Three groups on three canvases, one of them not square, each with its own trained steps."""
    guided = kind != "text"
    params = SamplingParams(
        height=12,
        width=12,
        num_inference_steps=5,
        eta=eta,
        rule="flow",
        noise=NoiseRecipe(seed=3),
        guidance_scale=2.5 if guided else 1.0,
        cfg_img_scale=1.5 if kind == "edit" else 1.0,
        cfg_renorm_type="channel",
    )
    roots = Part(
        ids=("r0.p0", "r0.p1", "r0.p2"),
        prompts=("a handwritten three", "seven", "somebody's handwritten nine"),
        metadata=tuple({"canvas": canvas} for canvas in CANVASES),
        images=tuple(np.random.default_rng(i).integers(0, 256, (8, 12, 1), dtype=np.uint8) for i in range(3))
        if kind == "edit"
        else None,
    )
    rows = roots.fork(siblings, params)
    steps = torch.tensor([[0, 2], [1, 3], [0, 4]]).repeat_interleave(siblings, dim=0)
    rows = stack.stage.sample(rows.replace(sde_steps=steps), decode=False)
    ones = torch.ones(len(rows), dtype=torch.int64)
    return rows.replace(
        push_version=0 * ones,
        policy_step=0 * ones,
        advantages=torch.linspace(-1, 1, len(rows), dtype=torch.float64),
    )


@pytest.mark.parametrize("kind", ["text", "guided", "edit"])
def test_replay_gives_the_rollouts_bits_in_any_micro_and_beside_any_neighbours(
    stack: TrainStack, kind: str
) -> None:
    rows = rollout(stack, kind)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        for size in (1, 4, len(rows)):
            for start in range(0, len(rows), size):
                micro = rows.select(order[start : start + size])
                assert torch.equal(stack.stage.replay(micro).log_probs, micro.segment.log_probs)


@pytest.mark.parametrize("eta", [0.1, 0.3, 0.7])
def test_a_noise_level_that_float32_cannot_hold_is_the_same_on_both_sides(
    stack: TrainStack, eta: float
) -> None:
    rows = rollout(stack, "text", eta=eta, siblings=16)
    with torch.no_grad():
        assert torch.equal(stack.stage.replay(rows).log_probs, rows.segment.log_probs)


def test_a_row_alone_and_among_other_canvases_has_the_same_bits(stack: TrainStack) -> None:
    rows = rollout(stack, "guided")
    for row in (0, SIBLINGS, 2 * SIBLINGS):
        alone = stack.stage.sample(
            rows.select([row]).replace(segment=None, fingerprints=None, layouts=None), decode=False
        )
        assert torch.equal(alone.segment.log_probs[0], rows.segment.log_probs[row])
        assert torch.equal(alone.segment.final()[0], rows.segment.final()[row])


def trained(stack: TrainStack, rows: Part, micro_batch_size: int) -> dict[str, float]:
    canvases = rows.canvases()
    plan = plan_updates(rows.group_ids, canvases, [1.0] * len(rows), 1, 1, micro_batch_size).for_rank(0)
    return merge_results([stack.train(rows.select(plan.rows), plan)])


def test_parity_is_exactly_zero_on_fresh_rows_and_under_lag(stack: TrainStack) -> None:
    stack.keep_pushed(0)
    rows = rollout(stack, "text")
    fresh = trained(stack, rows, 4)
    lagging = trained(stack, rows, 2)
    for metrics in (fresh, lagging):
        assert metrics["parity/abs_dlogp_max"] == 0.0 and metrics["parity/abs_ratio_minus_one_max"] == 0.0
        assert {f"parity/abs_dlogp_max/{h}x{w}" for h, w in CANVASES} <= set(metrics)
    assert fresh["async/policy_lag"] == 0 and lagging["async/policy_lag"] == 1
    assert "async/drift_abs_dlogp_max" not in fresh and lagging["async/drift_abs_dlogp_max"] > 0


def test_the_probe_replays_a_few_rows_of_every_canvas(
    stack: TrainStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.keep_pushed(0)
    rows = rollout(stack, "text")
    trained(stack, rows, 4)
    replay, seen = stack.stage.replay, []
    monkeypatch.setattr(
        stack.stage, "replay", lambda part, **given: seen.append(part.ids) or replay(part, **given)
    )
    trained(stack, rows, 4)
    assert seen[0] == ("r0.p0/0", "r0.p1/0", "r0.p2/0", "r0.p0/1")
    assert sum(len(ids) for ids in seen) == len(rows) + 4


def test_any_difference_at_all_is_told(stack: TrainStack) -> None:
    rows = rollout(stack, "text")
    moved = rows.segment.log_probs.clone()
    moved[7, 1] = torch.nextafter(moved[7, 1], torch.tensor(torch.inf))
    result_rows = rows.replace(segment=rows.segment.replace(log_probs=moved))
    canvases = rows.canvases()
    plan = plan_updates(rows.group_ids, canvases, [1.0] * len(rows), 1, 1, 4).for_rank(0)
    (warning,) = stack.train(result_rows.select(plan.rows), plan).warnings
    assert "r0.p1/2" in warning and "12x12" in warning and "parity.bitwise" in warning


# ---- where it cannot hold


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"batch_invariant": False}}, "model.batch_invariant"),
        ({"stack": {"first_update_ratio_tol": 1e-6}}, "stack.first_update_ratio_tol"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_bitwise_mode_does_not_go_with_is_named(changes: dict[str, Any], key: str) -> None:
    check(parse(RunConfig, RECIPE | {"buffer_max_staleness": 0}), asynchronous=False)
    with pytest.raises(ValueError, match=rf"parity\.bitwise is true.*{key}"):
        check(parse(RunConfig, RECIPE | {"buffer_max_staleness": 0} | changes), asynchronous=False)


def test_a_preset_that_is_not_batch_invariant_is_named() -> None:
    config = parse(RunConfig, {"parity": {"bitwise": True}, "model": {"preset": "bagel-7b-mot"}})
    with pytest.raises(ValueError, match=r"parity\.bitwise.*bagel-7b-mot.*model\.batch_invariant: true"):
        models.model_config(config)
    switched = {"preset": "bagel-7b-mot", "batch_invariant": True}
    assert models.model_config(
        parse(RunConfig, {"parity": {"bitwise": True}, "model": switched})
    ).batch_invariant


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"model": {"dtype": "bfloat16"}}, "model.dtype"), ({"threads_per_worker": 2}, "threads_per_worker")],
    ids=("bfloat16", "threads"),
)
def test_what_it_needs_of_a_cpu_is_named_and_a_gpu_takes_it(
    changes: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse(RunConfig, RECIPE | {"buffer_max_staleness": 0} | changes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"parity\.bitwise is true.*{key}"):
        models.pick_device(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert models.pick_device(config) == "cuda"


def test_every_linear_layer_and_norm_knows_of_it(stack: TrainStack) -> None:
    layers = [m for m in stack.stage.model.modules() if isinstance(m, (torch.nn.Linear, RMSNorm))]
    assert {type(layer) for layer in layers} == {Linear, RMSNorm}
    assert all(layer.batch_invariant for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3, 32), (5, 32), (1, 9, 32), (0, 4, 32), (3, 2, 5, 32)], ids=str)
def test_a_product_by_entry_has_an_entrys_bits_in_any_batch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = Linear(32, 24).to(dtype)
    entries = torch.randn(shape).to(dtype)
    out = layer.by_entry(entries)
    assert out.shape == (*shape[:-1], 24)
    torch.testing.assert_close(out, torch.nn.functional.linear(entries, layer.weight, layer.bias))
    for number in range(shape[0]):
        assert torch.equal(layer.by_entry(entries[number : number + 1])[0], out[number])


def test_it_is_on_by_default_where_it_can_hold(random_base: Path) -> None:
    model = BagelStage.from_pretrained(random_base).model
    assert is_bitwise(parse(RunConfig, {}), model)
    assert not is_bitwise(parse(RunConfig, {"parity": {"bitwise": False}}), model)
    assert not is_bitwise(parse(RunConfig, {"threads_per_worker": 2}), model)
    assert not is_bitwise(parse(RunConfig, {}), model.to(torch.bfloat16))
    loose = BagelStage.from_pretrained(
        random_base, preset("bagel-digits").replace(batch_invariant=False)
    ).model
    assert not is_bitwise(parse(RunConfig, {}), loose)
