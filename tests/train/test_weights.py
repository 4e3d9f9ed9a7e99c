# SPDX-License-Identifier: Apache-2.0
"""Pushes: what lands, and how a receiver that got it wrong is found out by its own live parameters."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_lora import TINY, X, randomise, run, tiny

from unirl.config import LoraConfig, ModelConfig
from unirl.train import lora
from unirl.train.trainable import prepare, trained_parameters
from unirl.train.weights import WeightMismatch, apply_push, bind_push, build_push, digest_of, verify_push

MODEL = ModelConfig(train="lora", lora=TINY)


def adapted(seed: int | None = None) -> torch.nn.Module:
    model = tiny()
    prepare(model, MODEL, seed=0)
    if seed is not None:
        randomise(model, seed)
    return model


def test_pushed_adapter_changes_the_output_to_the_trainers():
    trainer, engine = adapted(1), adapted()
    before = run(engine, X)
    push = build_push(trainer, 3, 8)
    assert (push.kind, push.push_version, push.policy_step) == ("adapter", 3, 8)
    assert apply_push(engine, push) == push.digest
    assert torch.equal(run(engine, X), run(trainer, X)) and not torch.equal(run(engine, X), before)


def test_pushing_twice_is_pushing_once():
    trainer = adapted(1)
    for kind in ("adapter", "merged"):
        engine = adapted() if kind == "adapter" else tiny()
        push = build_push(trainer, 1, 1, kind=kind)
        first, once = apply_push(engine, push), run(engine, X)
        assert apply_push(engine, push) == first and torch.equal(run(engine, X), once)


def test_three_forms_of_the_adapter_agree():
    trainer, engine, plain = adapted(1), adapted(), tiny()
    apply_push(engine, build_push(trainer, 1, 1))
    apply_push(plain, build_push(trainer, 1, 1, kind="merged"))
    assert torch.equal(run(engine, X), run(trainer, X))
    torch.testing.assert_close(run(plain, X), run(trainer, X), rtol=1e-5, atol=1e-5)


def test_push_without_a_step_changes_no_bit():
    trainer, engine = adapted(), adapted()
    before = run(engine, X)
    apply_push(engine, build_push(trainer, 1, 0))
    assert torch.equal(run(engine, X), before)


def test_push_is_a_copy():
    trainer = adapted(1)
    push = build_push(trainer, 1, 1)
    sent = {n: t.clone() for n, t in push.tensors.items()}
    randomise(trainer, 9)
    assert all(torch.equal(sent[n], t) for n, t in push.tensors.items())


def test_receiver_that_drops_the_load_is_found_out():
    with pytest.raises(WeightMismatch, match=r"4 of 4 live parameters differ"):
        verify_push(adapted(), build_push(adapted(1), 1, 1))


def test_one_tensor_in_the_wrong_place_is_found_out_and_named():
    push, engine = build_push(adapted(1), 1, 1), adapted()
    bind_push(engine, push)
    live = lora.adapter_parameters(engine)
    name = next(n for n in live if "o_proj.lora_B" in n)
    other = next(n for n in live if "q_proj.lora_B" in n)
    with torch.no_grad():
        live[name][:5].copy_(push.tensors[other])
    with pytest.raises(WeightMismatch, match=r"1 of 4 live parameters differ.*o_proj\.lora_B"):
        verify_push(engine, push)


def test_other_scale_is_found_out_though_every_factor_landed():
    engine = tiny()
    prepare(engine, ModelConfig(train="lora", lora=dataclasses.replace(TINY, alpha=6)), seed=0)
    with pytest.raises(
        WeightMismatch, match=r"scale differs in 2 layers.*sent 1\.5, live 3\.0.*model\.lora\.alpha"
    ):
        apply_push(engine, build_push(adapted(1), 1, 1))


@pytest.mark.parametrize("kind", ["adapter", "merged", "full"])
def test_push_that_lost_a_tensor_is_found_out(kind):
    trainer = _full(1) if kind == "full" else adapted(1)
    push = build_push(trainer, 1, 1, kind=kind)
    lost = dict(push.tensors)
    del lost[sorted(lost)[0]]
    engine = adapted() if kind == "adapter" else tiny()
    with pytest.raises(ValueError, match=r"not given: .*layers|one is missing"):
        apply_push(engine, dataclasses.replace(push, tensors=lost))


def test_push_that_was_changed_on_the_way_is_found_out():
    push = build_push(adapted(1), 1, 1)
    changed = {n: t.clone() for n, t in push.tensors.items()}
    next(iter(changed.values()))[0, 0] += 1e-3
    with pytest.raises(WeightMismatch, match="changed on the way"):
        apply_push(adapted(), dataclasses.replace(push, tensors=changed))


def test_unmatched_names_and_zero_bound_names_are_errors_that_leave_the_engine_alone():
    push, engine = build_push(adapted(1), 1, 1), adapted(2)
    before = run(engine, X)
    renamed = {f"model.{n}": t for n, t in push.tensors.items()}
    with pytest.raises(ValueError, match=r"0 of 4 names are bound; not in the model: model\.base_model"):
        apply_push(engine, dataclasses.replace(push, tensors=renamed))
    with pytest.raises(ValueError, match="0 of 0 names"):
        apply_push(engine, dataclasses.replace(push, tensors={}))
    reshaped = dict(push.tensors)
    name = next(iter(reshaped))
    reshaped[name] = reshaped[name][:1]
    with pytest.raises(ValueError, match="has shape"):
        apply_push(engine, dataclasses.replace(push, tensors=reshaped))
    assert torch.equal(run(engine, X), before)
    with pytest.raises(ValueError, match="the receiving model has none"):
        apply_push(tiny(), push)


def _full(seed: int) -> torch.nn.Module:
    model = tiny()
    prepare(model, ModelConfig(train="full"), seed=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def test_full_weights_travel_as_far_as_they_are_trained():
    trainer, engine = _full(1), tiny(0)
    trainer["layers"][0]["o_proj"].requires_grad_(False)
    push = build_push(trainer, 1, 1)
    assert push.kind == "full" and set(push.tensors) == {"layers.0.q_proj.weight", "layers.0.q_proj.bias"}
    kept = engine["layers"][0]["o_proj"].weight.clone()
    assert apply_push(engine, push) == push.digest
    assert torch.equal(engine["layers"][0]["q_proj"].weight, trainer["layers"][0]["q_proj"].weight)
    assert torch.equal(engine["layers"][0]["o_proj"].weight, kept)


def test_full_weights_into_a_model_that_stores_them_fused():
    class Fused(torch.nn.Module):
        """Both layers' weights in one buffer, the second one transposed."""

        def __init__(self) -> None:
            super().__init__()
            self.store = torch.nn.Parameter(torch.zeros(60))

        def public_tensors(self):
            return {
                "layers.0.q_proj.weight": self.store.data[:30].view(5, 6),
                "layers.0.o_proj.weight": self.store.data[30:].view(5, 6).t(),
            }

    trainer = _full(1)
    for name, parameter in trainer.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    engine = Fused()
    push = build_push(trainer, 1, 1)
    assert apply_push(engine, push) == push.digest
    weights = [trainer["layers"][0][n].weight.detach() for n in ("q_proj", "o_proj")]
    assert torch.equal(engine.store.data, torch.cat([weights[0].flatten(), weights[1].t().flatten()]))


def test_wire_dtype_rounds_once_and_the_digest_is_of_what_was_sent():
    trainer, engine = adapted(1), adapted()
    push = build_push(trainer, 1, 1, torch.bfloat16)
    assert {t.dtype for t in push.tensors.values()} == {torch.bfloat16}
    assert apply_push(engine, push) == push.digest != build_push(trainer, 1, 1).digest
    live = lora.adapter_parameters(engine)
    assert all(torch.equal(live[n], t.float()) for n, t in push.tensors.items())


def test_average_travels_instead_of_the_live_weights():
    trainer, engine = adapted(1), adapted()
    average = {n: torch.full_like(p, 0.25) for n, p in trained_parameters(trainer).items()}
    apply_push(engine, build_push(trainer, 1, 1, values=average))
    assert all(torch.equal(average[n], p) for n, p in lora.adapter_parameters(engine).items())
    with pytest.raises(ValueError, match="merged"):
        build_push(trainer, 1, 1, values=average, kind="merged")


def test_kind_must_fit_the_model():
    with pytest.raises(ValueError, match="'full' was asked of a model with an adapter"):
        build_push(adapted(), 1, 1, kind="full")
    with pytest.raises(ValueError, match="'adapter' was asked of a model without"):
        build_push(_full(1), 1, 1, kind="adapter")


def test_digest_tells_names_orders_and_pairs_apart():
    a, b = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)
    assert digest_of({"x": a, "y": b}) == digest_of({"y": b, "x": a})
    assert len({digest_of({"x": a, "y": b}), digest_of({"x": b, "y": a}), digest_of({"x": a, "z": b})}) == 3


def test_product_of_the_factors_is_in_the_digest_and_is_right():
    from unirl.train.weights import NUM_PROBES, _product_probe

    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 37, generator=generator), torch.randn(9, 4, generator=generator)
    probe = _product_probe(a, b, 2.0)
    unit = _product_probe(torch.eye(37), torch.eye(37), 1.0)  # the probes x themselves
    assert probe.shape == (NUM_PROBES, 9) and set(unit.flatten().tolist()) == {-1.0, 1.0}
    torch.testing.assert_close(
        probe.double(), 2.0 * (b.double() @ a.double() @ unit.double().t()).t(), rtol=1e-6, atol=1e-6
    )
    assert not torch.equal(unit[0], unit[1])
    scales = {"q": 1.0}
    named = {f"base_model.model.q.lora_{s}.weight": t for s, t in (("A", a), ("B", b))}
    assert digest_of(named, scales) != digest_of(named, {"q": 2.0}) != digest_of(named)


def test_lora_of_another_rank_does_not_fit():
    engine = tiny()
    prepare(engine, ModelConfig(train="lora", lora=LoraConfig(rank=3, alpha=3, targets=TINY.targets)), seed=0)
    with pytest.raises(ValueError, match=r"has shape \[2, 6\]; the model's is \[3, 6\]"):
        apply_push(engine, build_push(adapted(1), 1, 1))
