# SPDX-License-Identifier: Apache-2.0
"""What it costs to know that rollout and replay agree, and to have them agree to the bit.

    python benchmarks/bench_parity.py overhead    # fingerprint, checks and probe as a share of a rollout's work
    python benchmarks/bench_parity.py bitwise     # seconds and largest |delta log-prob| with and without batch invariance
    python benchmarks/bench_parity.py drift       # drift by canvas in one mixed rollout, in bfloat16 too, on a GPU if any

The first two do a digits recipe's rollouts (generation, replay, update, rows one push old) in one process on one thread, and count
its CPU seconds, which other processes on the machine do not lengthen. The third samples rows of three canvases, replays them in
micro-batches of another size under the same weights, and counts wall seconds. Results go to `results/parity.jsonl`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from _models import random_stage
from _runs import ROOT, record

from unirl.config import RunConfig
from unirl.distributed.collective import LocalCollective
from unirl.distributed.models import ASSETS, build_model
from unirl.models.bagel import BagelStage
from unirl.models.bagel import stage as stage_module
from unirl.models.bagel.layers import make_batch_invariant
from unirl.reward.stack import micro_batches
from unirl.train.checks import ReplayChecks
from unirl.train.plan import plan_updates
from unirl.train.stack import TrainStack, merge_results
from unirl.trainer.requests import Requests
from unirl.types import NoiseRecipe, Part, SamplingParams

RECIPES = ("digits_async", "digits_mixed")


class Loop:
    """Generation and training of a recipe, one rollout after the other, each trained one push late."""

    def __init__(self, config: RunConfig) -> None:
        torch.set_num_threads(1)
        self.config = config
        model, self.stage = build_model(config)
        self.stack = TrainStack(self.stage, model, config, LocalCollective())
        self.requests = Requests(config)
        self.stack.keep_pushed(0)
        self.version = 0
        self.waiting = self.generate(0)

    def generate(self, number: int) -> Part:
        rows = self.requests.training(number).frontier
        micros = micro_batches(rows.group_ids, self.config.reward_stack.micro_batch_size)
        rows = Part.concat([self.stage.sample(rows.select(micro)) for micro in micros]).replace(media=None)
        ones = torch.ones(len(rows), dtype=torch.int64)
        generator = torch.Generator().manual_seed(number)
        rewards = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        rows = rows.replace(
            push_version=self.version * ones, policy_step=self.stack.policy_step * ones, rewards=rewards
        )
        return rows.compute_advantages()

    def rollout(self, number: int) -> dict[str, float]:
        """Generates rollout `number` and trains the one before it; returns its metrics and CPU seconds."""
        begin = time.process_time()
        fresh = self.generate(number)
        generated = time.process_time()
        rows = self.waiting
        plan = plan_updates(
            rows.group_ids,
            rows.canvases(),
            [float(c.height * c.width) for c in rows.canvases()],
            1,
            self.config.stack.num_updates_per_batch,
            self.config.stack.micro_batch_size,
        ).for_rank(0)
        metrics = merge_results([self.stack.train(rows.select(plan.rows), plan)])
        trained = time.process_time()
        self.waiting = fresh
        self.version += 1
        self.stack.keep_pushed(self.version)
        return metrics | {"generate_s": generated - begin, "train_s": trained - generated}


class Clock:
    """CPU seconds spent inside chosen functions; one that another counted one calls is not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    @contextmanager
    def watching(self, *functions: tuple[str, Any, str]) -> Iterator[None]:
        """Each (what it counts as, owner, attribute)."""
        with ExitStack() as stack:
            for what, owner, name in functions:
                honest = getattr(owner, name)
                setattr(owner, name, self._timed(what, honest))
                stack.callback(setattr, owner, name, honest)
            yield

    def _timed(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*positional: Any, **named: Any) -> Any:
            if self._inside:
                return function(*positional, **named)
            self._inside, begin = True, time.process_time()
            try:
                return function(*positional, **named)
            finally:
                self._inside = False
                self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - begin

        return timed


def overhead(num_rollouts: int) -> list[dict[str, Any]]:
    """Shares of a rollout's CPU seconds."""
    rows = []
    for name in RECIPES:
        loop = Loop(load(name))
        loop.rollout(1)
        clock = Clock()
        watched = [
            ("fingerprint", BagelStage, "_layouts"),
            *(("fingerprint", stage_module, name) for name in ("_fingerprints", "_by_row", "to_host")),
            *(
                ("checks", ReplayChecks, name)
                for name in ("see_layout", "see_parity", "see_drift", "flags", "report")
            ),
            ("probe", TrainStack, "_probe"),
        ]
        with clock.watching(*watched):
            found = [loop.rollout(2 + number) for number in range(num_rollouts)]
        total = sum(f["generate_s"] + f["train_s"] for f in found)
        row: dict[str, Any] = {
            "what": "overhead",
            "recipe": name,
            "rollouts": num_rollouts,
            "cpu_s a rollout": round(total / num_rollouts, 4),
        }
        row |= {f"{what} %": round(100 * s / total, 3) for what, s in sorted(clock.seconds.items())}
        row["all %"] = round(100 * sum(clock.seconds.values()) / total, 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def bitwise(num_rollouts: int) -> list[dict[str, Any]]:
    """CPU seconds with and without batch invariance, in turn, and what it buys."""
    rows = []
    for name in RECIPES:
        loops = {}
        for invariant in (True, False):
            config = load(name)
            model = dataclasses.replace(config.model, batch_invariant=invariant)
            # Micros of an odd size: the rollout's and the replay's batches differ, as they do in practice.
            stack = dataclasses.replace(config.stack, micro_batch_size=7)
            loops[invariant] = Loop(dataclasses.replace(config, model=model, stack=stack))
        found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(1, num_rollouts + 1):
            for invariant in (True, False) if number % 2 else (False, True):
                found[invariant].append(loops[invariant].rollout(number))
        row: dict[str, Any] = {"what": "bitwise", "recipe": name, "rollouts": num_rollouts, "micro": 7}
        for invariant, label in ((True, "invariant"), (False, "plain")):
            for phase in ("generate_s", "train_s"):
                row[f"{label} {phase}"] = round(statistics.median(f[phase] for f in found[invariant]), 3)
            row[f"{label} |dlogp|"] = max(f["parity/abs_dlogp_max"] for f in found[invariant])
        for phase in ("generate_s", "train_s"):
            row[f"cost of {phase} %"] = round(
                100 * (row[f"invariant {phase}"] / row[f"plain {phase}"] - 1), 1
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def drift(num_rounds: int, num_layers: int) -> list[dict[str, Any]]:
    """Largest and mean |delta log-prob| of a mixed rollout by canvas, and seconds, with batch invariance and without."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name, stage, sides, clip_range in _drift_stages(device, num_layers):
        for dtype in (torch.float32, torch.bfloat16):
            if name != "digits" and dtype is torch.float32:
                continue  # nobody trains it so
            stage.model.to(dtype)
            found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            for number in range(num_rounds + 1):
                for invariant in (True, False) if number % 2 else (False, True):
                    found[invariant].append(_sample_and_replay(stage, sides, invariant, number))
            cost = {
                phase: 100
                * (
                    statistics.median(f[phase] for f in found[True][1:])
                    / statistics.median(f[phase] for f in found[False][1:])
                    - 1
                )
                for phase in ("sample_s", "replay_s")
            }
            for invariant in (False, True):
                warm = found[invariant][1:]
                row: dict[str, Any] = {
                    "what": "drift",
                    "model": name,
                    "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                    "dtype": str(dtype).removeprefix("torch."),
                    "batch_invariant": invariant,
                    "clip_range": clip_range,
                }
                for canvas in warm[0]["drift"]:
                    gaps = torch.cat([f["drift"][canvas] for f in warm])
                    row[f"max {canvas}"] = float(gaps.max())
                    row[f"mean {canvas}"] = float(gaps.mean())
                for phase in ("sample_s", "replay_s"):
                    row[phase] = round(statistics.median(f[phase] for f in warm), 4)
                    if invariant:
                        row[f"cost of {phase} %"] = round(cost[phase], 1)
                rows.append(row)
                print(row, flush=True)
    return rows


def _drift_stages(device: str, num_layers: int) -> Iterator[tuple[str, BagelStage, list[list[int]], float]]:
    """(name, stage, canvases, clip range of the recipes) of the shipped digits base and, on a GPU, of a BAGEL of random weights."""
    digits = BagelStage.from_pretrained(ASSETS / "bagel-digits", device=device)
    yield "digits", digits, [[8, 8], [12, 8], [12, 12]], 1e-3
    if device == "cpu":
        return
    stage = random_stage("bagel-7b-mot", device, num_layers)
    yield f"bagel-7b, {num_layers} layers", stage, [[256, 256], [384, 256], [512, 512]], 1e-4


def _sample_and_replay(
    stage: BagelStage, sides: list[list[int]], invariant: bool, number: int
) -> dict[str, Any]:
    """One rollout of eight siblings a canvas with text guidance, replayed in micros of three rows."""
    model = stage.model
    model.config = model.config.replace(batch_invariant=invariant)
    make_batch_invariant(model, invariant)
    height, width = max(sides)
    params = SamplingParams(
        height=height,
        width=width,
        num_inference_steps=6,
        eta=0.7,
        rule="flow",
        noise=NoiseRecipe(seed=number),
        guidance_scale=3.0,
        cfg_renorm_type="channel",
        trajectory_dtype="bfloat16" if model.dtype is torch.bfloat16 else "float32",
    )
    roots = Part(
        ids=tuple(f"r{number}.p{index}" for index in range(len(sides))),
        prompts=("a handwritten three", "seven", "somebody's handwritten nine"),
        metadata=tuple({"canvas": side} for side in sides),
    )
    rows = roots.fork(8, params)
    rows = rows.replace(sde_steps=torch.tensor([[0, 2, 4]] * len(rows)))

    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    begin = now()
    rows = stage.sample(rows, decode=False)
    sampled = now()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number)).tolist()
    gaps: dict[str, list[torch.Tensor]] = {}
    with torch.no_grad():
        for start in range(0, len(rows), 3):
            micro = rows.select(order[start : start + 3])
            replayed = stage.replay(micro).log_probs.cpu()
            for canvas, gap in zip(
                micro.canvases(), (replayed - micro.segment.log_probs.cpu()).abs(), strict=True
            ):
                gaps.setdefault(f"{canvas.height}x{canvas.width}", []).append(gap)
    return {
        "sample_s": sampled - begin,
        "replay_s": now() - sampled,
        "drift": {canvas: torch.cat(found) for canvas, found in sorted(gaps.items())},
    }


def load(recipe: str) -> RunConfig:
    """A digits recipe as its entry point composes it."""
    from hydra import compose, initialize_config_dir

    from unirl.config import parse

    with initialize_config_dir(str(ROOT / "examples"), version_base=None):
        composed = compose(f"diffusion/digits/{recipe}")
    from omegaconf import OmegaConf

    return parse(RunConfig, OmegaConf.to_container(composed, resolve=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("overhead", "bitwise", "drift"))
    parser.add_argument("--rollouts", type=int, default=6)
    parser.add_argument(
        "--layers", type=int, default=12, help="of the large model of `drift`; the public one has 28"
    )
    options = parser.parse_args()
    if options.what == "drift":
        rows = drift(options.rollouts, options.layers)
    else:
        rows = {"overhead": overhead, "bitwise": bitwise}[options.what](options.rollouts)
    print(record("parity", rows))


if __name__ == "__main__":
    main()
