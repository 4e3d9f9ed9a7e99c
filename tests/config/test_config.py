# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest

from unirl.config import RunConfig, changed_keys, check, parse, to_plain, warnings

SCORERS = {"reward": {"scorers": [{"name": "digit_probability"}]}}


def config(**changes: Any) -> RunConfig:
    return parse(RunConfig, SCORERS | changes)


def test_a_misspelt_key_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="unknown key 'num_rollout'; did you mean 'num_rollouts'"):
        config(num_rollout=3)
    with pytest.raises(ValueError, match=r"unknown key 'optim.wamup_steps'; did you mean 'warmup_steps'"):
        config(optim={"wamup_steps": 3})


def test_a_misspelt_value_is_an_error_with_the_allowed_ones() -> None:
    with pytest.raises(
        ValueError, match=r"layout is 'seperate'; allowed: colocate, separate; did you mean 'separate'"
    ):
        config(layout="seperate")


def test_something_asked_for_and_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"stack\.parallel is 'fsdp2'; allowed: ddp"):
        config(stack={"parallel": "fsdp2"})


@pytest.mark.parametrize("value", ["three", 3.5, True, None])
def test_a_value_of_the_wrong_type_names_key_and_type(value: Any) -> None:
    with pytest.raises(ValueError, match=r"num_rollouts is .*; allowed: int"):
        config(num_rollouts=value)


def test_yaml_text_like_1e_minus_3_is_a_number() -> None:
    assert config(optim={"lr": "1e-3"}).optim.lr == 1e-3


def test_lists_become_tuples_of_the_declared_length() -> None:
    assert config(sampling={"cfg_interval": [0.4, 1]}).sampling.cfg_interval == (0.4, 1.0)
    with pytest.raises(ValueError, match=r"sampling\.cfg_interval has 3 values"):
        config(sampling={"cfg_interval": [0, 1, 2]})


def test_plain_and_back_is_the_same_config() -> None:
    original = config(model={"lora": {"rank": 4}}, data={"eval": {"a": {"name": "digits"}}})
    assert parse(RunConfig, to_plain(original)) == original


def test_changed_keys_are_dotted_and_complete() -> None:
    old, new = to_plain(config()), to_plain(config(seed=4, optim={"lr": 0.5}))
    assert changed_keys(old, new) == {"seed": (0, 4), "optim.lr": (1e-4, 0.5)}


@pytest.mark.parametrize(
    ("changes", "asynchronous", "message"),
    [
        ({"layout": "colocate"}, True, "async trainer needs layout: separate"),
        ({"layout": "separate", "num_devices": 1}, True, "num_devices of at least 2"),
        (
            {"layout": "separate", "num_devices": 4, "train_fraction": 0.05},
            True,
            "train_fraction 0.05 of num_devices 4 gives 0",
        ),
        (
            {"layout": "separate", "num_devices": 2, "transport_kind": "colocate_store", "max_inflight": 2},
            True,
            "max_inflight: 1",
        ),
        ({"transport_kind": "colocate_store"}, False, "needs layout: separate"),
        ({"buffer_max_staleness": 1}, False, "sync trainers have no buffer"),
        ({"sampling": {"eta": 0.0}}, False, "sampling.eta is 0.0"),
        ({"save_interval": 3, "weight_sync_interval": 2}, False, "multiple of weight_sync_interval"),
        ({"model": {"path": "/nowhere/weights"}}, False, "model.path '/nowhere/weights' does not exist"),
        ({"reward": {"scorers": [{"name": "a", "weight": 0.0}]}}, False, "all have weight 0"),
        ({"batch_size": 2, "stack": {"num_updates_per_batch": 3}}, False, "a batch has 2 groups"),
        ({"ray_address": ""}, False, "ray_address is ''; allowed: the address"),
        ({"run_dir": " "}, False, "run_dir is ' '; allowed: the path"),
    ],
)
def test_combinations_that_cannot_run_are_refused_by_key(
    changes: dict[str, Any], asynchronous: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(config(**changes), asynchronous=asynchronous)


def test_replayed_old_log_probs_under_lag_need_an_adapter_and_both_keys_are_named() -> None:
    lagging = {"old_logp_source": "replay", "model": {"train": "full"}, "weight_sync_interval": 2}
    with pytest.raises(ValueError, match=r"old_logp_source: replay.*model\.train"):
        check(config(**lagging), asynchronous=False)
    check(config(**(lagging | {"weight_sync_interval": 1})), asynchronous=False)


@pytest.mark.parametrize(
    ("section", "key", "value", "allowed"),
    [
        ("eval", "num_prompts", -3, "1 or more"),
        ("eval", "num_prompts", 0, "1 or more"),
        ("eval", "micro_batch_size", 0, "1 or more"),
        ("eval", "grid_columns", -1, "1 or more"),
        ("eval", "eta", -1.0, "0 or more"),
        ("eval", "seed", 2**64, "an integer of at most 64 bits"),
        ("sampling", "height", -8, "1 or more"),
        ("sampling", "num_inference_steps", 0, "1 or more"),
        ("sampling", "shift", -1.0, "a number above 0"),
        ("sampling", "cfg_interval", [0.9, 0.1], r"\[from, to\] with 0 <= from < to <= 1"),
        ("sampling", "cfg_renorm_min", 5.0, "0 to 1"),
        ("algorithm", "beta", -1.0, "0 or more"),
        ("algorithm", "adv_clip", -5.0, "a number above 0"),
        ("optim", "betas", [0.9, 1.0], "two numbers from 0 up to, not including, 1"),
        ("optim", "eps", 0.0, "a number above 0"),
        ("optim", "warmup_steps", -5, "0 or more"),
        ("optim", "weight_decay", -0.1, "0 or more"),
        ("stack", "first_update_ratio_tol", -1e-6, "0 or more"),
    ],
)
def test_a_number_out_of_its_range_is_refused_by_key(
    section: str, key: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError, match=rf"{section}\.{key} is .*; allowed: {allowed}$"):
        check(config(**{section: {key: value}}), asynchronous=False)


def test_an_adapter_out_of_range_is_refused_before_a_worker_builds_it() -> None:
    for change, allowed in (
        ({"rank": 0}, "1 or more"),
        ({"alpha": -1}, "1 or more"),
        ({"dropout": 0.5}, r"0 \("),
    ):
        with pytest.raises(ValueError, match=rf"model\.lora\.{next(iter(change))} is .*; allowed: {allowed}"):
            check(config(model={"lora": change}), asynchronous=False)


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("sampling.eta", lambda n: {"sampling": {"eta": n}}),
        ("sampling.guidance_scale", lambda n: {"sampling": {"guidance_scale": n}}),
        ("train_fraction", lambda n: {"train_fraction": n}),
        ("worker_timeout_s", lambda n: {"worker_timeout_s": n}),
        ("optim.betas[1]", lambda n: {"optim": {"betas": [0.9, n]}}),
        ("reward_stack.cost.a", lambda n: {"reward_stack": {"cost": {"a": n}}}),
        ("reward.scorers[0].weight", lambda n: {"reward": {"scorers": [{"name": "x", "weight": n}]}}),
    ],
)
def test_no_number_of_a_recipe_is_nan_or_infinite(key: str, changes: Any, number: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(key)} is {number}; allowed: a finite number"):
        check(config(**changes(number)), asynchronous=False)


def test_a_group_of_one_row_is_refused_where_rows_are_compared_within_groups() -> None:
    alone = {"samples_per_prompt": 1}
    with pytest.raises(
        ValueError, match=r"samples_per_prompt is 1 and algorithm\.advantage_scope is group.*: batch"
    ):
        check(config(**alone), asynchronous=False)
    by_batch = alone | {"algorithm": {"advantage_scope": "batch"}}
    check(config(**by_batch), asynchronous=False)
    normalised = by_batch | {"reward": SCORERS["reward"] | {"normalise": "group"}}
    with pytest.raises(ValueError, match=r"samples_per_prompt is 1 and reward\.normalise is group.*: none"):
        check(config(**normalised), asynchronous=False)


def test_what_the_sync_trainers_do_not_read_is_a_warning_there_alone() -> None:
    asked = config(
        layout="separate", num_devices=2, max_inflight=2, buffer_order="freshest", reap_before_launch=False
    )
    assert warnings(asked, asynchronous=True) == []
    said = warnings(asked, asynchronous=False)
    assert [text.split()[0] for text in said] == ["max_inflight", "buffer_order", "reap_before_launch"]
    assert warnings(config(), asynchronous=False) == []


def test_weights_that_are_never_pushed_before_the_end_are_a_warning() -> None:
    (said,) = warnings(config(num_rollouts=22, weight_sync_interval=1000), asynchronous=True)
    assert said.startswith("weight_sync_interval is 1000 and num_rollouts 22")
    assert len(warnings(config(num_rollouts=22, weight_sync_interval=22), asynchronous=True)) == 1
    assert warnings(config(num_rollouts=22, weight_sync_interval=11), asynchronous=True) == []
    assert warnings(config(num_rollouts=1), asynchronous=True) == []
