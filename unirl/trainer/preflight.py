# SPDX-License-Identifier: Apache-2.0
"""What can be known before a worker starts: the recipe's checks, the data, the model's files, what the run will do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unirl.config import RunConfig, check, warnings
from unirl.data import PromptDataset
from unirl.distributed.models import check_model, model_limits, pick_device
from unirl.distributed.workloads import RowCosts
from unirl.metrics import check_sinks
from unirl.reward import check_scorers
from unirl.reward.set_metrics import check_set_metrics
from unirl.trainer.checkpoints import AUTO, RunCheckpoints
from unirl.trainer.estimate import estimate_seconds
from unirl.trainer.requests import Requests
from unirl.trainer.rundir import RunDir


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked run: its recipe, requests and folder, and a text that says what will happen."""

    config: RunConfig
    asynchronous: bool
    requests: Requests
    row_costs: RowCosts
    run_dir: RunDir
    checkpoints: RunCheckpoints
    text: str


def preflight(config: RunConfig, *, asynchronous: bool) -> Plan:
    """Checks the recipe; raises `ValueError` with the key to change. Starts nothing, leaves nothing behind."""
    check(config, asynchronous=asynchronous)
    check_scorers(config.reward.scorers, "reward.scorers")
    check_scorers(config.eval.scorers, "eval.scorers")
    check_set_metrics(config.eval.set_metrics)
    check_sinks(tensorboard=config.logging.tensorboard, wandb=config.logging.wandb)
    check_model(config)
    row_costs = RowCosts(config)
    requests = Requests(config)
    if requests.dataset.has_images:
        row_costs.check_source_images()
    limits = model_limits(config)
    pick_device(config)
    requests.check_canvases(pixel_stride=limits.pixel_stride, max_side=limits.max_side)
    run_dir = RunDir(Path(config.run_dir))
    run_dir.check_writable()
    if config.resume is None or not run_dir.holds(config.resume):
        run_dir.check_new()
    checkpoints = RunCheckpoints(config, run_dir)
    run_dir.metrics_before(checkpoints.first_rollout)
    text = describe(config, asynchronous, requests) + resumption(config, run_dir, checkpoints)
    return Plan(
        config,
        asynchronous,
        requests,
        row_costs,
        run_dir,
        checkpoints,
        text,
    )


def resumption(config: RunConfig, run_dir: RunDir, checkpoints: RunCheckpoints) -> str:
    """What a run goes on from and what its recipe changes, a line each; empty for one that starts."""
    if config.resume is None or (config.resume == AUTO and not run_dir.config_file.exists()):
        return ""
    changes = run_dir.accepted_changes(config)
    from_where = (
        f"checkpoint {checkpoints.path}" if checkpoints.path else "the beginning: there is no checkpoint"
    )
    lines = [
        f"  resumed from {from_where}",
        *(f"  changed: {k} {was!r} -> {now!r}" for k, (was, now) in changes.items()),
    ]
    return "".join(f"\n{line}" for line in lines)


def describe(config: RunConfig, asynchronous: bool, requests: Requests) -> str:
    """What the run will do and about how long it will take; the first line stands alone."""
    rows = config.batch_size * config.samples_per_prompt
    train, rollout = config.slab_sizes()
    seconds = estimate_seconds(config, requests, asynchronous=asynchronous)
    kind = "async" if asynchronous else "sync"
    where = "on the same ranks" if config.layout == "colocate" else "beside each other"
    head = (
        f"{config.model.preset}, {kind} FlowGRPO ({config.model.train}): {config.num_rollouts} rollouts of {config.batch_size} "
        f"prompts x {config.samples_per_prompt} siblings = {rows} rows, {config.sampling.num_inference_steps} steps each; "
        f"about {duration(seconds)} after the workers' start, on {train} training and {rollout} rollout rank(s) {where}; "
        f"results in {config.run_dir}"
    )
    scorers = ", ".join(
        f"{s.name} x {s.weight:g}" if s.weight else f"{s.name} (monitor)" for s in config.reward.scorers
    )
    lines = [
        head,
        f"  data: {requests.dataset.name}, {len(requests.dataset)} prompts; evaluation: "
        + (", ".join(f"{n} ({_shown(d, config)})" for n, d in requests.eval_sets.items()) or "none"),
        f"  reward: {scorers}; normalise {config.reward.normalise}",
        f"  update: {config.stack.num_updates_per_batch} a rollout, lr {config.optim.lr:g}, "
        f"clip range {config.algorithm.clip_range:g}, KL weight {config.algorithm.beta:g}",
    ]
    if asynchronous:
        lines.append(
            f"  async: {config.max_inflight} in flight, a push every {config.weight_sync_interval} rollout(s), staleness at most "
            f"{config.buffer_max_staleness} push(es), {config.buffer_order} first, "
            f"{'reap' if config.reap_before_launch else 'launch'} first, {config.transport_kind}"
        )
    lines += [f"  warning: {text}" for text in warnings(config, asynchronous=asynchronous)]
    return "\n".join(lines)


def _shown(dataset: PromptDataset, config: RunConfig) -> str:
    first = config.eval.num_prompts
    several = f"{len(dataset)} prompts"
    return f"{first} of {several}" if first is not None and first < len(dataset) else several


def duration(seconds: float) -> str:
    """1.5 min, 3 h, 2 days: one figure is all that an estimate deserves."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 1):.0f} s"
