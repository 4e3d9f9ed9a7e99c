# SPDX-License-Identifier: Apache-2.0
"""What can be known to be wrong before a worker starts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unirl.config.parse import to_plain
from unirl.config.schema import RunConfig

ASYNC_ONLY = ("max_inflight", "buffer_order", "reap_before_launch")
"""Keys that the sync trainers do not read."""


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            "num_rollouts",
            "batch_size",
            "samples_per_prompt",
            "num_devices",
            "num_nodes",
            "threads_per_worker",
            "max_inflight",
            "weight_sync_interval",
            "stack.micro_batch_size",
            "stack.num_updates_per_batch",
            "reward_stack.micro_batch_size",
            "eval.samples_per_prompt",
            "checkpoint.keep_last",
            "model.lora.rank",
            "model.lora.alpha",
            "sampling.height",
            "sampling.width",
            "sampling.num_inference_steps",
            "sampling.sde.iterations_per_shift",
            "eval.num_prompts",
            "eval.micro_batch_size",
            "eval.grid_rows",
            "eval.grid_columns",
        ),
        ("1 or more", lambda value: value >= 1),
    ),
    **dict.fromkeys(
        (
            "eval_interval",
            "save_interval",
            "buffer_max_staleness",
            "max_worker_restarts",
            "worker_timeout_s",
            "parity.probe_rows",
            "parity.store_interval",
            "eval.eta",
            "algorithm.beta",
            "optim.weight_decay",
            "optim.warmup_steps",
            "stack.first_update_ratio_tol",
        ),
        ("0 or more", lambda value: value >= 0),
    ),
    **dict.fromkeys(
        (
            "sampling.shift",
            "algorithm.adv_clip",
            "algorithm.clip_range",
            "optim.eps",
            "optim.lr",
            "optim.max_grad_norm",
        ),
        ("a number above 0", lambda value: value > 0),
    ),
    "optim.ema.decay": ("0 (off) up to, not including, 1", lambda value: 0 <= value < 1),
    **dict.fromkeys(("seed", "eval.seed"), ("an integer of at most 64 bits", _within(-(2**63), 2**64 - 1))),
    "model.lora.dropout": ("0 (a replay has to compute what the rollout did)", lambda value: value == 0),
    "sampling.cfg_renorm_min": ("0 to 1", _within(0, 1)),
    "sampling.cfg_interval": (
        "[from, to] with 0 <= from < to <= 1",
        lambda value: 0 <= value[0] < value[1] <= 1,
    ),
    "optim.betas": (
        "two numbers from 0 up to, not including, 1",
        lambda value: all(0 <= b < 1 for b in value),
    ),
}
"""What single keys may hold, beyond their type: said, and as a test. `null` is judged by the type alone."""


def check(config: RunConfig, *, asynchronous: bool) -> None:
    """Raises `ValueError` for combinations of keys that cannot run, naming the keys to change."""
    _finite(config)
    _ranges(config)
    _updates(config)
    _sampling(config)
    _layout(config, asynchronous)
    _parity(config, asynchronous)
    _restarts(config)
    _code(config)
    _named(config)
    _comparable(config)
    if config.reward.scorers and not any(s.weight != 0 for s in config.reward.scorers):
        raise ValueError("reward.scorers all have weight 0 (monitors); give at least one a non-zero weight")
    if not config.reward.scorers:
        raise ValueError("reward.scorers is empty; name at least one scorer")
    if config.old_logp_source == "replay" and config.model.train == "full" and config.may_lag(asynchronous):
        raise ValueError(
            "old_logp_source: replay needs the generating weights of lagging rows, which are kept for adapters only, but "
            "model.train is full; set old_logp_source: rollout, or model.train: lora"
        )
    if config.save_interval % config.weight_sync_interval:
        raise ValueError(
            f"save_interval is {config.save_interval} and weight_sync_interval {config.weight_sync_interval}: a checkpoint "
            "is taken right after a push, when both slabs hold the same weights; make save_interval a multiple of "
            "weight_sync_interval"
        )
    if config.model.path is not None and not os.path.exists(config.model.path):
        raise ValueError(f"model.path {config.model.path!r} does not exist; change model.path")


def warnings(config: RunConfig, *, asynchronous: bool) -> list[str]:
    """What a recipe that can run hardly means, a text each with the key to change."""
    texts = []
    if config.weight_sync_interval >= config.num_rollouts > 1:
        texts.append(
            f"weight_sync_interval is {config.weight_sync_interval} and num_rollouts {config.num_rollouts}: every rollout is "
            "generated by the weights of the start; lower weight_sync_interval to see newer ones"
        )
    if not asynchronous:
        unused = [key for key in ASYNC_ONLY if getattr(config, key) != getattr(RunConfig(), key)]
        texts += [
            f"{key} is {getattr(config, key)!r} and does nothing in the sync trainers; leave it out, or use train_async_diffusion"
            for key in unused
        ]
    return texts


def _named(config: RunConfig) -> None:
    """Empty text is no name: it would be taken for another setting."""
    if not config.run_dir.strip():
        raise ValueError(f"run_dir is {config.run_dir!r}; allowed: the path of a folder")
    if config.ray_address is not None and not config.ray_address.strip():
        raise ValueError(
            f"ray_address is {config.ray_address!r}; allowed: the address of a Ray cluster, auto, or null to start one"
        )


def _comparable(config: RunConfig) -> None:
    """An advantage compares a row with others; a row alone is always average, and nothing would be learnt."""
    if config.samples_per_prompt > 1:
        return
    for key, value, other in (
        ("algorithm.advantage_scope", config.algorithm.advantage_scope, "batch"),
        ("reward.normalise", config.reward.normalise, "none"),
    ):
        if value == "group":
            raise ValueError(
                f"samples_per_prompt is 1 and {key} is group: a row would be compared with itself alone, and nothing learnt; set "
                f"samples_per_prompt to 2 or more, or {key}: {other}"
            )


def _finite(config: RunConfig) -> None:
    """No key of the recipe is NaN or infinite; a scorer's options are its own to judge."""
    for key, value in _leaves(to_plain(config), ""):
        if isinstance(value, float) and not math.isfinite(value) and ".options." not in key:
            raise ValueError(f"{key} is {value}; allowed: a finite number")


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{where}[{index}]")
    else:
        yield where, value


def _ranges(config: RunConfig) -> None:
    for key, (allowed, holds) in RANGES.items():
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{key} is {shown}; allowed: {allowed}")


def _updates(config: RunConfig) -> None:
    if config.stack.num_updates_per_batch > config.batch_size:
        raise ValueError(
            f"stack.num_updates_per_batch is {config.stack.num_updates_per_batch}, but a batch has {config.batch_size} groups; "
            "lower it or raise batch_size"
        )


def _parity(config: RunConfig, asynchronous: bool) -> None:
    if config.parity.store_interval and config.model.train == "full" and config.may_lag(asynchronous):
        raise ValueError(
            "parity.store_interval stores rows with the weights that generated them; of full weights older ones are not kept, but "
            "rows may lag: set parity.store_interval: 0, or model.train: lora"
        )
    if not config.parity.bitwise:
        return
    asked = "parity.bitwise is true"
    if config.model.batch_invariant is False:
        raise ValueError(f"{asked}, but model.batch_invariant is false; set both alike")
    if config.stack.first_update_ratio_tol:
        raise ValueError(
            f"{asked}, which tolerates no difference, but stack.first_update_ratio_tol is {config.stack.first_update_ratio_tol}; "
            "leave it out, or set parity.bitwise: false"
        )


def _sampling(config: RunConfig) -> None:
    sampling = config.sampling
    sampling.sde.check(sampling.num_inference_steps, sampling.rule)
    if sampling.eta <= 0:
        raise ValueError(
            f"sampling.eta is {sampling.eta}; allowed: above 0 while training (eval.eta may be 0)"
        )
    if sampling.rule == "cps" and config.eval.eta > 1:
        raise ValueError(f"eval.eta is {config.eval.eta} with sampling.rule cps; allowed: 0 to 1")
    if sampling.rule == "cps" and sampling.eta > 1:
        raise ValueError(f"sampling.eta is {sampling.eta} with rule cps; allowed: above 0 and at most 1")


def _layout(config: RunConfig, asynchronous: bool) -> None:
    if asynchronous and config.layout != "separate":
        raise ValueError(
            f"layout is {config.layout!r}; the async trainer needs layout: separate (two disjoint slabs)"
        )
    if config.layout == "separate" and config.num_devices < 2:
        raise ValueError(
            f"layout: separate needs num_devices of at least 2, one a slab; num_devices is {config.num_devices}"
        )
    train_ranks, _ = config.slab_sizes()
    rows = config.batch_size // config.stack.num_updates_per_batch * config.samples_per_prompt
    if rows < train_ranks:
        raise ValueError(
            f"an update has {rows} rows, fewer rows than the {train_ranks} training ranks; raise batch_size or samples_per_prompt, "
            "or lower stack.num_updates_per_batch, num_devices or train_fraction"
        )
    if config.transport_kind == "colocate_store" and (
        config.layout != "separate" or config.max_inflight != 1
    ):
        raise ValueError(
            "transport_kind: colocate_store moves data through the rollout actor and needs layout: separate and max_inflight: 1; "
            f"they are {config.layout!r} and {config.max_inflight}; change them, or set transport_kind: object_store"
        )
    if not asynchronous and config.buffer_max_staleness:
        raise ValueError(
            f"buffer_max_staleness is {config.buffer_max_staleness}; the sync trainers have no buffer: set it to 0, "
            "or use train_async_diffusion"
        )


def _restarts(config: RunConfig) -> None:
    if not config.max_worker_restarts:
        return
    asked = f"max_worker_restarts is {config.max_worker_restarts}"
    if config.layout != "separate":
        raise ValueError(
            f"{asked}; only a worker that generates and does not train can be started again: set layout: separate, or "
            "max_worker_restarts: 0"
        )
    if config.transport_kind != "object_store":
        raise ValueError(
            f"{asked}, but with transport_kind: colocate_store a rollout worker holds trajectories that die with it; set "
            "transport_kind: object_store, or max_worker_restarts: 0"
        )


def _code(config: RunConfig) -> None:
    """A recipe from a stranger runs no code: names with a colon are imported, so they have to be allowed."""
    for key, scorers in (("reward.scorers", config.reward.scorers), ("eval.scorers", config.eval.scorers)):
        for index, scorer in enumerate(scorers):
            if ":" in scorer.name and not config.allow_code:
                raise ValueError(
                    f"{key}[{index}].name is {scorer.name!r}, code outside this package; set allow_code: true if you trust this "
                    "recipe, or name a built-in scorer"
                )
