# SPDX-License-Identifier: Apache-2.0
"""Replay and update: what a training rank does with its rows. A Ray actor only forwards to this."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from unirl.algorithms import FlowGRPO
from unirl.config import RunConfig
from unirl.metrics import Aggregate
from unirl.parity import RatioGuard, default_tolerance
from unirl.progress import reached
from unirl.protocols import Collective, Replay, Stage, WeightPush
from unirl.train import lora
from unirl.train.checks import NUM_FLAGS, ReplayChecks
from unirl.train.ema import Ema
from unirl.train.optim import Optimizer, StepReport
from unirl.train.plan import RankPlan, RankUpdate
from unirl.train.pushed import PushedWeights
from unirl.train.rng import load_rng, rng_tensors
from unirl.train.trainable import is_adapter, is_bitwise, swapped, trained_parameters
from unirl.train.weights import build_push
from unirl.types import LatentSegment, Part

CANVAS_PREFIX = "canvas/"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """One rank's training step.

    Attributes:
        metrics: state of a `unirl.metrics.Aggregate`; `merge_results` makes one flat mapping of all ranks'.
        steps: what the optimizer did in each update, the same on all ranks.
        policy_step: optimizer steps taken since the run began.
        warnings: for the user, to be shown once each.
        seconds: `anchor_s`: replays without gradients before the first update; `update_s`: the updates; `exchange_s`: in these,
            summing gradients over ranks, the wait for the slowest rank included.
    """

    metrics: dict[str, dict[str, float]]
    steps: tuple[StepReport, ...]
    policy_step: int
    warnings: tuple[str, ...]
    seconds: dict[str, float]


class TrainStack:
    """Trains one rank's rows.

    Args:
        stage: replays rows with `model`. model: made trainable by `unirl.train.trainable.prepare`; it stays
            in evaluation mode.
        collective: sums over the training ranks; all hold equal weights.

    The gradient of an update is that of sum(weight * loss) / sum(weight) over all ranks' rows, however they
    are cut into micros: one flat sum over ranks an update, whatever the number of micros. A gradient that is
        not finite skips the step on every rank.
    """

    def __init__(
        self, stage: Stage, model: torch.nn.Module, config: RunConfig, collective: Collective
    ) -> None:
        model.eval()
        self.stage, self.model, self.config, self.collective = stage, model, config, collective
        self.algorithm = FlowGRPO(config.algorithm)
        self.parameters = trained_parameters(model)
        self.optimizer = Optimizer(self.parameters, config.optim, num_flags=NUM_FLAGS)
        self.ema = Ema(self.optimizer.masters, config.optim.ema) if config.optim.ema.decay else None
        self.pushed = PushedWeights(self.parameters, config, adapter=is_adapter(model))
        self.guard = RatioGuard(
            tolerance=_tolerance(config, model),
            action=config.stack.first_update_ratio_action,
            clip_range=config.algorithm.clip_range,
        )
        # Full weights have no adapter to disable, so the reference is a copy; taken before a checkpoint is loaded.
        self._reference: dict[str, torch.Tensor] | None = None
        if self.algorithm.needs_means and not is_adapter(model):
            self._reference = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._live_while_averaged: dict[str, torch.Tensor] | None = None
        self._exchange_s = 0.0

    @property
    def policy_step(self) -> int:
        """Optimizer steps inside the current weights."""
        return self.optimizer.steps_taken

    # ---- one training step

    def train(self, part: Part, plan: RankPlan) -> TrainResult:
        """All updates of one batch.

        Args:
            part: this rank's rows, `part.select(plan.rows)` of the batch, with segment, advantages, weights,
                `policy_step`, `push_version`.
            plan: `Plan.for_rank` of this rank.

        Raises:
            LayoutMismatch, RatioMismatch: before any step, on every rank.
            ValueError: rows that lack a column, or generating weights that are no longer kept.
        """
        self._check(part, plan)
        checks = ReplayChecks(self.guard, require_fingerprint=self.config.parity.require_fingerprint)
        metrics = Aggregate()
        if len(part):
            segment: LatentSegment = part.segment
            metrics.total(
                {
                    "storage/tokens": segment.stored_tokens(),
                    "storage/real_tokens": int(segment.token_counts.sum()),
                    "storage/bytes": segment.nbytes(),
                }
            )
        self._exchange_s = 0.0
        begin = time.perf_counter()
        with torch.no_grad():
            part = self._anchor(part, plan, checks)
        anchored = time.perf_counter()
        generated_at_step = self.policy_step
        steps = [
            self._update(part, update, number, generated_at_step, checks, metrics)
            for number, update in enumerate(plan.updates)
        ]
        checks.report(metrics)
        lag = (generated_at_step - _column(part, "policy_step")).double()
        if len(part):
            metrics.mean({"async/policy_lag": float(lag.mean())}, len(part))
            metrics.maximum({"async/policy_lag_max": float(lag.max())})
        if self.collective.rank == 0:  # once, not once a rank
            metrics.total(
                {
                    "train/skipped_steps": sum(s.skipped for s in steps),
                    "train/steps": sum(not s.skipped for s in steps),
                }
            )
        seconds = {
            "anchor_s": anchored - begin,
            "update_s": time.perf_counter() - anchored,
            "exchange_s": self._exchange_s,
        }
        return TrainResult(metrics.state(), tuple(steps), self.policy_step, tuple(checks.warnings), seconds)

    def _update(
        self,
        part: Part,
        update: RankUpdate,
        number: int,
        generated_at_step: int,
        checks: ReplayChecks,
        metrics: Aggregate,
    ) -> StepReport:
        if (
            update.weight_sum == 0
        ):  # no live row on any rank: nothing to average, and no rank takes part in a sum
            return StepReport(0.0, self.optimizer.learning_rate(), True)
        self.optimizer.zero_grad()
        for rows in update.micros:
            if rows:
                self._micro(part.select(rows), update.weight_sum, number, generated_at_step, checks, metrics)
        for flag, value in enumerate(checks.flags()):
            self.optimizer.flags[flag] = value
        reached("train.exchange")
        if self.optimizer.exchange.is_cuda:  # so that the clock below sees the exchange alone
            torch.cuda.synchronize(self.optimizer.exchange.device)
        begin = time.perf_counter()
        self.collective.sum_(self.optimizer.exchange)
        flags = self.optimizer.flags.tolist()
        self._exchange_s += time.perf_counter() - begin
        checks.raise_if_any(*(int(flag) for flag in flags))
        step = self.optimizer.step()
        if not step.skipped:
            metrics.mean({"gn": step.grad_norm, "lr": step.lr}, 1.0, update=number)
            if self.ema is not None:
                self.ema.update(self.optimizer.masters)
        return step

    def _micro(
        self,
        micro: Part,
        weight_sum: float,
        number: int,
        generated_at_step: int,
        checks: ReplayChecks,
        metrics: Aggregate,
    ) -> None:
        reached("train.micro")
        new = self.stage.replay(micro, with_means=self.algorithm.needs_means)
        checks.see_layout(micro, new)
        if number == 0:
            self._observe_first_update(micro, new, generated_at_step, checks)
        loss, found = self.algorithm.loss(new, micro, self._replay_reference(micro))
        weights = micro.live_weights()
        assert bool((weights > 0).all()), "the plan leaves rows of weight 0 out"
        total = (loss * weights.to(device=loss.device, dtype=loss.dtype)).sum() / weight_sum
        total.backward()
        self.optimizer.take_gradients()
        _note(found, micro, number, metrics)

    def _observe_first_update(
        self, micro: Part, new: Replay, generated_at_step: int, checks: ReplayChecks
    ) -> None:
        """Before any step: rows of the current weights must give their log-probs back, those of older ones
        show the policy's movement.
        """
        current, lagging = _by_lag(micro, generated_at_step)
        stored = micro.segment.log_probs
        if (
            self.config.old_logp_source == "rollout"
        ):  # else the stored ones were recomputed, and compared then
            checks.see_parity(micro, current, new.log_probs, stored)
        checks.see_drift(lagging, new.log_probs, stored)

    def _replay_reference(self, micro: Part) -> Replay | None:
        if not self.algorithm.needs_means:
            return None
        weights: AbstractContextManager[None] = (
            lora.adapter_disabled(self.model)
            if self._reference is None
            else swapped(self.parameters, self._reference)
        )
        with torch.no_grad(), weights:
            return self.stage.replay(micro, with_means=True)

    # ---- before the first step

    def _anchor(self, part: Part, plan: RankPlan, checks: ReplayChecks) -> Part:
        """Old log-probs as `old_logp_source` asks; under lag and `rollout`, a parity probe."""
        if len(part) == 0:  # no live row came to this rank; it still takes part in the sums
            return part
        if self.config.old_logp_source == "replay":
            return self._recompute(part, plan, checks)
        self._probe(part, checks)
        return part

    def _probe(self, part: Part, checks: ReplayChecks) -> None:
        """Replays a few lagging rows, of every canvas where they suffice, under the weights that generated them."""
        lagging = _by_lag(part, self.policy_step)[1]
        kept = [rows for version, rows in _by_version(part, lagging).items() if version in self.pushed]
        if kept and self.config.parity.probe_rows:
            canvases = part.canvases()
            probe = part.select(
                _spread(kept[0], [canvases[row] for row in kept[0]], self.config.parity.probe_rows)
            )
            assert probe.push_version is not None
            replayed = self._replay_under(probe, int(probe.push_version[0]))
            checks.see_parity(probe, range(len(probe)), replayed.log_probs, probe.segment.log_probs)

    def _recompute(self, part: Part, plan: RankPlan, checks: ReplayChecks) -> Part:
        """Log-probs of every row under the weights that generated it, in the micros in which it is trained.

        A micro of rows from several versions is replayed whole under each and the rows that belong are taken:
        their bits may depend on the size of the batch they are in.
        """
        old = part.segment.log_probs.clone()
        for rows in (micro for update in plan.updates for micro in update.micros if micro):
            micro = part.select(rows)
            current, lagging = _by_lag(micro, self.policy_step)
            sources: Iterable[tuple[int | None, list[int]]] = [
                *([(None, current)] if current else []),
                *_by_version(micro, lagging).items(),
            ]
            for version, members in sources:
                replay = self._replay_under(micro, version)
                checks.see_layout(micro, replay)
                replayed = replay.log_probs
                checks.see_parity(micro, members, replayed, micro.segment.log_probs)
                old[[rows[m] for m in members]] = replayed[members].to(device=old.device, dtype=old.dtype)
        return part.replace(segment=part.segment.replace(log_probs=old))

    def _replay_under(self, micro: Part, version: int | None) -> Replay:
        weights = nullcontext() if version is None else swapped(self.parameters, self.pushed.weights(version))
        with weights:
            return self.stage.replay(micro)

    def _check(self, part: Part, plan: RankPlan) -> None:
        if self._live_while_averaged is not None:
            raise RuntimeError(
                "the averaged weights are swapped in (swap_average); swap them back before training"
            )
        if (plan.rank, plan.world_size) != (self.collective.rank, self.collective.world_size):
            raise ValueError(
                f"this is rank {self.collective.rank} of {self.collective.world_size}; the plan is for rank "
                f"{plan.rank} of {plan.world_size}"
            )
        if len(part) != len(plan.rows):
            raise ValueError(
                f"the plan is for {len(plan.rows)} rows and {len(part)} came; send part.select(plan.rows)"
            )
        for name in ("segment", "advantages", "policy_step", "push_version"):
            if len(part) and getattr(part, name) is None:
                raise ValueError(f"TrainStack.train: the rows have no {name}")

    # ---- weights

    def build_push(self, push_version: int, *, average: bool = False, kind: Any = None) -> WeightPush:
        """The weights of push `push_version`: those that were kept under it, if they were, else the live
        ones, which are not kept yet.

        A version is one set of weights. So asking for it again, after an evaluation of averaged weights or a
        resume in the middle of a window, gives what the engine held, not what the policy has become.

        Args:
            average: the EMA's instead. kind: see `unirl.train.weights.build_push`.
        """
        if average:
            if self.ema is None:
                raise ValueError("optim.ema.decay is 0: there are no averaged weights to push")
            return build_push(self.model, push_version, self.policy_step, kind=kind, values=self._average())
        if push_version in self.pushed and kind != "merged":
            values = self.pushed.weights(push_version)
            return build_push(
                self.model, push_version, self.pushed.policy_step(push_version), kind=kind, values=values
            )
        return build_push(self.model, push_version, self.policy_step, kind=kind)

    def keep_pushed(self, push_version: int, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Keeps the live weights (or `tensors`) as those of a version, for rows that were generated under it.
        Every rank calls it.

        A version that is kept already stays what it is.
        """
        self.pushed.keep(push_version, self.policy_step, tensors)

    def swap_average(self) -> None:
        """Exchanges live and averaged weights; a second call undoes the first, bit for bit."""
        if self._live_while_averaged is not None:
            for name, parameter in self.parameters.items():
                parameter.data = self._live_while_averaged[name]
            self._live_while_averaged = None
            return
        if self.ema is None:
            raise ValueError("optim.ema.decay is 0: there are no averaged weights to swap in")
        average = self._average()
        self._live_while_averaged = {name: p.data for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.data = average[name]

    def export_adapter(self, folder: str | Path, *, average: bool = False) -> Path:
        """Writes the adapter in plain peft format; see `unirl.train.lora.export`."""
        return lora.export(
            self.model, folder, values=self._average() if average and self.ema is not None else None
        )

    def _average(self) -> dict[str, torch.Tensor]:
        assert self.ema is not None
        return {
            name: self.ema.tensors[name].to(device=p.device, dtype=p.dtype, copy=True)
            for name, p in self.parameters.items()
        }

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """`tensors`: section -> name -> live tensor; `counts`: JSON. Equal on every rank but for `rng`."""
        tensors: dict[str, dict[str, torch.Tensor]] = {
            "trained": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.state_tensors(),
            "pushed": self.pushed.state_tensors(),
            "rng": rng_tensors(),
        }
        counts: dict[str, Any] = {
            "optimizer": self.optimizer.state_counts(),
            "pushed": self.pushed.state_counts(),
        }
        if self.ema is not None:
            tensors["ema"] = self.ema.tensors
            counts["ema"] = self.ema.num_updates
        return {"tensors": tensors, "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave. Raises `ValueError` when it is of other weights, or of a run with
        or without EMA.
        """
        tensors, counts = state["tensors"], state["counts"]
        if ("ema" in counts) != (self.ema is not None):
            raise ValueError(
                "the saved run and this one do not agree on having an EMA; set optim.ema.decay as it was"
            )
        lora.copy_named(tensors["trained"], self.parameters, "the saved weights")
        self.optimizer.load(tensors["optimizer"], counts["optimizer"])
        self.pushed.load(tensors["pushed"], counts["pushed"])
        if self.ema is not None:
            self.ema.load(tensors["ema"], int(counts["ema"]))
        load_rng(tensors["rng"])


def merge_results(results: Sequence[TrainResult]) -> dict[str, float]:
    """All ranks' metrics as one flat mapping: `ratio`, `clip`, `gn`, `loss`, `parity/*`, `async/*`, `perf/*`,
    ...

    Means are over rows of all micros, ranks and updates and come with their maximum (`clip_max`) and each
    update's own mean (`clip/update_0`); a skipped step counts in `train/skipped_steps` and not in `gn`.
    """
    merged = Aggregate().merge([r.metrics for r in results]).result()
    by_canvas = [name for name in merged if name.startswith(CANVAS_PREFIX)]
    if len({name.split("/")[1] for name in by_canvas}) < 2:  # what is true of all is said already
        for name in by_canvas:
            del merged[name]
    if merged.get("storage/tokens"):
        merged["storage/padding_share"] = 1.0 - merged["storage/real_tokens"] / merged["storage/tokens"]
    for phase in ("anchor_s", "update_s"):
        merged[f"perf/train_{phase}"] = max(r.seconds[phase] for r in results)
    busy_s = [r.seconds["anchor_s"] + r.seconds["update_s"] - r.seconds["exchange_s"] for r in results]
    merged["perf/train_busy_s"] = max(busy_s)
    merged["perf/train_tail_ratio"] = max(busy_s) * len(busy_s) / max(sum(busy_s), 1e-12)
    merged["policy_step"] = float(results[0].policy_step)
    return merged


def _tolerance(config: RunConfig, model: torch.nn.Module) -> float:
    asked = config.stack.first_update_ratio_tol
    if asked is not None:
        return asked
    return 0.0 if is_bitwise(config, model) else default_tolerance(config.model.dtype)


def _note(found: Mapping[str, torch.Tensor], micro: Part, number: int, metrics: Aggregate) -> None:
    """The algorithm's row values, read back from the device at once."""
    reduced = torch.stack([v.max() if name.endswith("_max") else v.mean() for name, v in found.items()])
    values = dict(zip(found, reduced.tolist(), strict=True))
    num_rows = len(micro)
    metrics.mean({n: v for n, v in values.items() if not n.endswith("_max")}, num_rows, update=number)
    metrics.maximum({n: v for n, v in values.items() if n.endswith("_max")})
    metrics.total({"rows/trained": num_rows})
    height, width = micro.canvases()[0]  # a micro holds one
    metrics.mean({f"{CANVAS_PREFIX}{height}x{width}/clip": values["clip"]}, num_rows)
    metrics.maximum({f"{CANVAS_PREFIX}{height}x{width}/abs_dlogp_max": values["abs_dlogp_max"]})


def _spread(rows: Sequence[int], kinds: Sequence[Hashable], count: int) -> list[int]:
    """At most `count` of `rows`, taking the first of every kind before the second of any."""
    seen: Counter[Hashable] = Counter()
    ranked = []
    for position, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        ranked.append((seen[kind], position, row))
        seen[kind] += 1
    return [row for _, _, row in sorted(ranked)[:count]]


def _column(part: Part, name: str) -> torch.Tensor:
    value = getattr(part, name)
    return torch.zeros(0, dtype=torch.int64) if value is None else value


def _by_lag(micro: Part, policy_step: int) -> tuple[list[int], list[int]]:
    """(rows generated by the current weights, rows generated by older ones)."""
    steps = _column(micro, "policy_step").tolist()
    current = [row for row, step in enumerate(steps) if step == policy_step]
    return current, [row for row, step in enumerate(steps) if step != policy_step]


def _by_version(micro: Part, rows: Sequence[int]) -> dict[int, list[int]]:
    versions: dict[int, list[int]] = {}
    for row in rows:
        versions.setdefault(int(_column(micro, "push_version")[row]), []).append(row)
    return versions
