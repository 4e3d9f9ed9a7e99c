# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from unirl.config import RunConfig, changed_keys, check, parse, to_plain

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
