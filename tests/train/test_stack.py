# SPDX-License-Identifier: Apache-2.0
"""Replay and update on a stage that can be checked by hand."""

from __future__ import annotations

import copy
import math

import linear_stage as small
import pytest
import torch

from unirl.algorithms import FlowGRPO
from unirl.parity import LayoutMismatch, RatioMismatch
from unirl.train.plan import plan_updates
from unirl.train.stack import TrainStack, merge_results
from unirl.train.trainable import prepare
from unirl.types import Part

LORA = {"train": "lora", "lora": {"rank": 2, "alpha": 4, "targets": ["mid", "out"]}}
FULL = {"train": "full"}


def make_stack(
    dtype: torch.dtype = torch.float32, *, model: dict | None = None, collective=None, **sections
) -> TrainStack:
    config = small.recipe(model=model or LORA, **sections)
    policy = small.LinearPolicy(dtype)
    prepare(policy, config.model, seed=config.seed)
    if dtype is torch.float64:
        policy.double()
    return TrainStack(small.LinearStage(policy), policy, config, collective or small.SoloCollective())


def train(
    stack: TrainStack, part: Part, *, num_updates: int = 1, micro_batch_size: int = 64
) -> dict[str, float]:
    plan = small.plan_of(part, num_updates=num_updates, micro_batch_size=micro_batch_size)
    return merge_results([stack.train(small.ordered(part, plan), plan)])


def weights(stack: TrainStack) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in stack.parameters.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def record_gradient(stack: TrainStack) -> list[torch.Tensor]:
    """The flat gradient of every step, before clipping, as the optimizer gets it."""
    found: list[torch.Tensor] = []
    step = stack.optimizer.step

    def recorded():
        found.append(stack.optimizer.flat_gradient.clone())
        return step()

    stack.optimizer.step = recorded
    return found


def test_ratio_is_exactly_one_before_the_first_step_and_the_loss_is_zero():
    stack = make_stack()
    metrics = train(stack, small.batch(stack.stage))
    assert metrics["parity/abs_dlogp_max"] <= 1e-6 and metrics["parity/abs_ratio_minus_one_max/2x2"] <= 1e-6
    assert abs(metrics["loss"]) < 1e-6 and metrics["gn"] > 0 and metrics["clip"] == 0
    assert metrics["policy_step"] == 1 and metrics["train/steps"] == 1


def test_second_update_shows_a_ratio_that_is_not_one():
    stack = make_stack(optim={"lr": 1e-2})
    metrics = train(stack, small.batch(stack.stage), num_updates=2)
    assert abs(metrics["ratio/update_0"] - 1) <= 1e-6
    assert abs(metrics["ratio/update_1"] - 1) > 1e-5
    assert metrics["abs_dlogp_max"] > 1e-5 and metrics["parity/abs_dlogp_max"] <= 1e-6
    assert metrics["train/steps"] == 2


@pytest.mark.parametrize("micro_batch_size", [1, 5, 12])
@pytest.mark.parametrize("model", [LORA, FULL], ids=["lora", "full"])
def test_gradient_is_that_of_the_weighted_mean_however_it_is_cut(micro_batch_size, model):
    stack = make_stack(torch.float64, model=model, algorithm={"clip_range": 0.2})
    part = small.batch(stack.stage, canvases=((2, 2), (2, 4)))
    part = part.replace(weights=torch.tensor([1.0, 2.0, 0.5] * 4, dtype=torch.float64))
    # Move the policy off the point where every ratio is 1, and so the loss's derivative is linear.
    with torch.no_grad():
        for parameter in stack.parameters.values():
            parameter.add_(0.01)
    algorithm = FlowGRPO(stack.config.algorithm)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(part)):  # every row alone, no plan, no flat buffer
        one = part.select([row])
        loss, _ = algorithm.loss(stack.stage.replay(one), one)
        total = total + part.weights[row] * loss[0]
    expected = torch.autograd.grad(total / part.weights.sum(), list(stack.parameters.values()))
    found = record_gradient(stack)
    train(stack, part, micro_batch_size=micro_batch_size)
    torch.testing.assert_close(found[0], torch.cat([g.flatten() for g in expected]), rtol=1e-12, atol=1e-14)


def test_rows_of_weight_zero_influence_nothing():
    one, other = make_stack(), make_stack()
    part = small.batch(one.stage)
    dead = torch.ones(len(part), dtype=torch.float64)
    dead[[0, 5, 6, 7, 8]] = 0.0
    part = part.replace(weights=dead).compute_advantages()
    poisoned = part.segment.latents.clone()
    poisoned[[0, 5, 6]] = math.nan
    wild = part.replace(
        segment=part.segment.replace(latents=poisoned),
        advantages=torch.where(dead == 0, torch.tensor(1e30, dtype=torch.float64), part.advantages),
        fingerprints=part.fingerprints + (dead == 0).long()[:, None],
    )
    first, second = train(one, part, micro_batch_size=4), train(other, wild, micro_batch_size=4)
    assert same(weights(one), weights(other))
    timeless = {k for k in first if not k.startswith("perf/")}
    assert {k: first[k] for k in timeless} == {k: second[k] for k in timeless}
    assert first["rows/trained"] == 7


def test_update_without_a_live_row_is_left_out_on_every_rank():
    collective = small.SoloCollective()
    stack = make_stack(collective=collective)
    part = small.batch(stack.stage, num_groups=2)
    part = part.replace(weights=torch.zeros(len(part), dtype=torch.float64))
    before = weights(stack)
    plan = small.plan_of(part)
    result = stack.train(small.ordered(part, plan), plan)
    assert same(before, weights(stack)) and collective.num_sums == 0 and stack.policy_step == 0
    assert merge_results([result])["train/skipped_steps"] == 1


def test_non_finite_step_leaves_weights_optimizer_and_average_untouched_and_is_counted():
    stack = make_stack(optim={"ema": {"decay": 0.9}, "warmup_steps": 4})
    train(stack, small.batch(stack.stage))
    before = copy.deepcopy(stack.state_dict())
    part = small.batch(stack.stage, policy_step=1)
    part = part.replace(advantages=torch.full_like(part.advantages, math.inf))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack.algorithm, "config", small.recipe(algorithm={"adv_clip": None}).algorithm)
        metrics = train(stack, part)
    after = stack.state_dict()
    for section in ("trained", "optimizer", "ema"):
        assert same(before["tensors"][section], after["tensors"][section])
    assert metrics["train/skipped_steps"] == 1 and metrics["train/steps"] == 0 and "gn" not in metrics
    assert after["counts"]["optimizer"] == {"steps_taken": 1, "steps_skipped": 1}
    assert after["counts"]["ema"] == before["counts"]["ema"] == 1
    assert stack.policy_step == 1


def test_same_input_gives_the_same_bits():
    results = []
    for _ in range(2):
        stack = make_stack(optim={"ema": {"decay": 0.9}})
        for i in range(3):
            train(stack, small.batch(stack.stage, policy_step=stack.policy_step, seed=i), num_updates=2)
            # the next batch comes from the new weights
        results.append(weights(stack))
    assert same(*results)


def test_clip_fractions_of_uneven_updates_are_averaged_by_rows_and_the_worst_is_kept():
    stack = make_stack(optim={"lr": 0.05}, algorithm={"clip_range": 1e-4})
    part = small.batch(stack.stage, num_groups=4, siblings=1)
    part = part.replace(advantages=torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64))
    plan = plan_updates(["a", "a", "a", "b"], part.canvases(), [1.0] * 4, 1, 2, 8).for_rank(0)
    metrics = merge_results([stack.train(part, plan)])
    assert metrics["clip/update_0"] == 0.0 and metrics["clip/update_1"] > 0.0
    assert metrics["clip"] == pytest.approx(metrics["clip/update_1"] / 4)
    assert metrics["clip_max"] == metrics["clip/update_1"]


def test_kl_to_the_reference_is_zero_before_the_first_step_and_grows():
    for model in (LORA, FULL):
        stack = make_stack(model=model, algorithm={"beta": 0.1}, optim={"lr": 1e-2})
        first = train(stack, small.batch(stack.stage))
        assert first["kl_ref"] == 0.0
        second = train(stack, small.batch(stack.stage, policy_step=1))
        assert second["kl_ref"] > 0.0


def test_kl_pulls_back_to_the_reference():
    moved = {}
    for beta in (0.0, 1000.0):
        stack = make_stack(algorithm={"beta": beta, "adv_clip": None, "clip_range": 0.2}, optim={"lr": 1e-2})
        start = small.batch(stack.stage)
        for step in range(12):
            part = small.batch(stack.stage, policy_step=step)
            train(stack, part)
        end = stack.stage.replay(start).log_probs
        moved[beta] = float((end - start.segment.log_probs).abs().mean().detach())
    assert moved[1000.0] < 0.5 * moved[0.0]


# ---- agreement of rollout and replay


def test_changed_layout_stops_before_the_first_step_and_names_rows_and_fields():
    stack = make_stack()
    part = small.batch(stack.stage)
    before = weights(stack)
    wrong = part.replace(prompts=("a word",) * 10 + ("words",) * 2)
    with pytest.raises(LayoutMismatch, match=r"r0\.p3/1 +prompt +6 +5") as caught:
        train(stack, wrong)
    assert caught.value.ids == ("r0.p3/1", "r0.p3/2")
    assert same(before, weights(stack)) and stack.policy_step == 0


def test_missing_fingerprints_are_an_error_unless_allowed():
    stack = make_stack()
    part = small.batch(stack.stage).replace(fingerprints=None)
    with pytest.raises(LayoutMismatch, match=r"parity\.require_fingerprint"):
        train(stack, part)
    train(make_stack(parity={"require_fingerprint": False}), part)


def _off_by(part: Part, value: float) -> Part:
    log_probs = part.segment.log_probs.clone()
    log_probs[4, 1] += value
    return part.replace(segment=part.segment.replace(log_probs=log_probs))


def test_guard_warns_with_row_and_canvas_and_training_goes_on():
    stack = make_stack()
    part = _off_by(small.batch(stack.stage), 1e-2)
    plan = small.plan_of(part)
    result = stack.train(small.ordered(part, plan), plan)
    assert stack.policy_step == 1
    assert any("1.00e-02" in w and "r0.p1/1" in w and "2x2" in w for w in result.warnings)
    assert any("clip_range" in w for w in result.warnings)
    assert merge_results([result])["parity/abs_dlogp_max"] == pytest.approx(1e-2, rel=1e-3)


def test_guard_raises_before_the_first_step_when_asked():
    stack = make_stack(stack={"first_update_ratio_action": "raise"})
    before = weights(stack)
    with pytest.raises(RatioMismatch, match=r"r0\.p1/1"):
        train(stack, _off_by(small.batch(stack.stage), 1e-2))
    assert same(before, weights(stack))
    tolerant = make_stack(stack={"first_update_ratio_action": "raise", "first_update_ratio_tol": 0.1})
    train(tolerant, _off_by(small.batch(tolerant.stage), 1e-2))


def _lagging(**sections) -> tuple[TrainStack, Part]:
    """A stack that took two steps after rows had been generated with its push 0."""
    stack = make_stack(optim={"lr": 1e-2}, buffer_max_staleness=2, **sections)
    stack.keep_pushed(0)
    old = small.batch(stack.stage, seed=5)
    for step in range(2):
        train(stack, small.batch(stack.stage, policy_step=step, push_version=step))
        stack.keep_pushed(step + 1)
    return stack, old


def test_under_lag_parity_measures_numerics_and_drift_the_policy():
    stack, old = _lagging()
    live = weights(stack)
    metrics = train(stack, old)
    assert metrics["parity/abs_dlogp_max"] <= 1e-6
    assert metrics["async/drift_abs_dlogp_max"] > 1e-4
    assert metrics["async/policy_lag"] == 2
    assert abs(metrics["ratio"] - 1) > 1e-6
    assert not same(live, weights(stack)) and stack.policy_step == 3


def test_replayed_old_log_probs_come_from_the_generating_weights():
    stack, old = _lagging(old_logp_source="replay")
    metrics = train(stack, old)
    # Under the current weights they would equal the new ones, every ratio would be 1, and the correction lost.
    assert abs(metrics["ratio"] - 1) > 1e-6
    assert metrics["parity/abs_dlogp_max"] <= 1e-6
    twin, _ = _lagging()
    stored = train(twin, old)
    assert metrics["abs_dlogp_max"] == pytest.approx(stored["abs_dlogp_max"], abs=1e-6)


def test_rows_of_several_versions_are_each_replayed_under_their_own():
    stack, old = _lagging(old_logp_source="replay")
    fresh = small.batch(stack.stage, policy_step=2, push_version=2, seed=6)
    rows = [r for pair in zip(range(6), range(6, 12), strict=True) for r in pair]
    mixed = Part.concat([old.select(range(6)), fresh.select(range(6, 12)).replace(ids=fresh.ids[6:])]).select(
        rows
    )
    live = weights(stack)
    part = mixed.replace(segment=mixed.segment.replace(log_probs=torch.zeros_like(mixed.segment.log_probs)))
    plan = small.plan_of(part)
    sent = small.ordered(part, plan)
    checks_free = stack._recompute(sent, plan, _Silent())
    expected = small.ordered(mixed, plan).segment.log_probs
    torch.testing.assert_close(checks_free.segment.log_probs, expected, rtol=0, atol=1e-6)
    assert same(live, weights(stack))


class _Silent:
    def see_layout(self, *_):
        pass

    def see_parity(self, *_):
        pass


def test_weights_that_are_no_longer_kept_are_asked_for_by_name():
    stack, old = _lagging(old_logp_source="replay")
    with pytest.raises(ValueError, match=r"version 9.*kept are \[0, 1, 2\]"):
        train(stack, old.replace(push_version=old.push_version + 9))


def test_only_as_many_pushes_are_kept_as_rows_can_be_old():
    stack = make_stack(buffer_max_staleness=1)
    for version in range(5):
        stack.keep_pushed(version)
    assert [v in stack.pushed for v in range(5)] == [False, False, False, True, True]


def test_a_version_is_one_set_of_weights():
    stack = make_stack(optim={"lr": 1e-2})
    first = stack.build_push(0)
    stack.keep_pushed(0)
    train(stack, small.batch(stack.stage))
    stack.keep_pushed(0)  # kept already: it stays what the engine got
    again, new = stack.build_push(0), stack.build_push(1)
    assert again.digest == first.digest != new.digest
    assert (again.policy_step, new.policy_step) == (0, 1)


def test_averaged_weights_are_swapped_in_and_out_to_the_bit():
    stack = make_stack(optim={"lr": 1e-2, "ema": {"decay": 0.9}})
    train(stack, small.batch(stack.stage), num_updates=2)
    live, average = weights(stack), {n: t.clone() for n, t in stack.ema.tensors.items()}
    assert not same(live, average)
    assert dict(stack.build_push(1, average=True).tensors).keys() == average.keys()
    stack.swap_average()
    assert same(weights(stack), average)
    with pytest.raises(RuntimeError, match="swap"):
        train(stack, small.batch(stack.stage, policy_step=2))
    stack.swap_average()
    assert same(weights(stack), live)
    with pytest.raises(ValueError, match=r"optim\.ema\.decay is 0"):
        make_stack().swap_average()


@pytest.mark.parametrize("model", [LORA, FULL], ids=["lora", "full"])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(model):
    sections = {
        "model": model,
        "optim": {"lr": 1e-2, "ema": {"decay": 0.9}, "warmup_steps": 15},
        "buffer_max_staleness": 2,
    }

    def steps(stack: TrainStack, first: int, last: int) -> None:
        for i in range(first, last):
            part = small.batch(stack.stage, policy_step=stack.policy_step, push_version=i, seed=i)
            stack.keep_pushed(i)
            train(stack, part, num_updates=2)

    whole = make_stack(**sections)
    steps(whole, 0, 20)
    half = make_stack(**sections)
    steps(half, 0, 10)
    state = copy.deepcopy(half.state_dict())
    resumed = make_stack(**sections)
    resumed.load_state_dict(state)
    steps(resumed, 10, 20)
    left, right = whole.state_dict(), resumed.state_dict()
    assert left["counts"] == right["counts"]
    for section in ("trained", "optimizer", "ema", "pushed"):
        assert same(left["tensors"][section], right["tensors"][section]), section


def test_state_of_other_weights_is_refused():
    state = make_stack().state_dict()
    with pytest.raises(ValueError, match="names are bound"):
        make_stack(model=FULL).load_state_dict(state)
    with pytest.raises(ValueError, match=r"optim\.ema\.decay"):
        make_stack(optim={"ema": {"decay": 0.5}}).load_state_dict(state)


def test_rows_that_lack_something_are_refused_by_name():
    stack = make_stack()
    part = small.batch(stack.stage)
    plan = small.plan_of(part)
    with pytest.raises(ValueError, match="no advantages"):
        stack.train(part.replace(advantages=None), plan)
    with pytest.raises(ValueError, match="12 rows and 3 came"):
        stack.train(part.select([0, 1, 2]), plan)
    other = plan_updates(part.group_ids, part.canvases(), [1.0] * 12, 2, 1, 8).for_rank(1)
    with pytest.raises(ValueError, match="rank 0 of 1; the plan is for rank 1 of 2"):
        stack.train(part.select(other.rows), other)
