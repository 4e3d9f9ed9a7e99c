# SPDX-License-Identifier: Apache-2.0
"""A rollout that is stored with its weights can be replayed to the bit, and `unirl parity` says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from unirl.cli import main
from unirl.cli_parity import check_run
from unirl.config import RunConfig, check, parse, to_plain
from unirl.distributed.collective import LocalCollective
from unirl.distributed.models import build_model
from unirl.distributed.sides import TrainSide
from unirl.train.checkpoint import CheckpointDamaged
from unirl.train.plan import plan_updates
from unirl.train.stored_rollout import find_rollout, load_rollout, save_rollout
from unirl.types import NoiseRecipe, Part, Sample, SamplingParams

CANVASES = ([8, 8], [12, 12], [12, 8])


class Run:
    """A run directory, and the training side of the run that left it."""

    def __init__(self, folder: Path, base: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.config = parse(
            RunConfig,
            {
                "run_dir": str(folder),
                "buffer_max_staleness": 2,
                "model": {"path": str(base), "lora": {"rank": 2, "alpha": 2}},
                "optim": {"lr": 0.01},
                "sampling": {"height": 12, "width": 12},
                "stack": {"micro_batch_size": 4},
            },
        )
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(self.config)))
        model, self.stage = build_model(self.config)
        self.side = TrainSide(self.config, model, self.stage, LocalCollective())
        self.stack = self.side.stack

    def generate(self, rollout: int, push_version: int) -> Part:
        params = SamplingParams(
            height=12, width=12, num_inference_steps=4, eta=0.8, rule="flow", noise=NoiseRecipe(seed=0)
        )
        roots = Part(
            ids=tuple(f"r{rollout}.p{i}" for i in range(3)),
            prompts=("three", "a handwritten seven", "nine"),
            metadata=tuple({"canvas": canvas} for canvas in CANVASES),
        )
        rows = roots.fork(2, params)
        rows = self.stage.sample(rows.replace(sde_steps=torch.tensor([[0, 2]] * 6)), decode=False)
        ones = torch.ones(6, dtype=torch.int64)
        return rows.replace(
            push_version=push_version * ones,
            policy_step=self.stack.policy_step * ones,
            advantages=torch.linspace(-1, 1, 6, dtype=torch.float64),
        )

    def train(self, rows: Part) -> None:
        plan = plan_updates(rows.group_ids, rows.canvases(), [1.0] * len(rows), 1, 1, 4).for_rank(0)
        self.stack.train(rows.select(plan.rows), plan)


@pytest.fixture
def run(tmp_path: Path, random_base: Path) -> Run:
    return Run(tmp_path / "run", random_base)


def lagging_rollout(run: Run) -> Part:
    """Rows of two weight versions, neither of them the current one."""
    run.stack.keep_pushed(0)
    first = run.generate(0, 0)
    run.train(first)
    run.stack.keep_pushed(1)
    second = run.generate(1, 1)
    run.train(second)
    return Part.concat([first, second])


def test_rows_and_weights_come_back_bit_for_bit(run: Run) -> None:
    rows = lagging_rollout(run)
    path = save_rollout(run.folder / "parity", 7, rows, run.stack)
    assert path == find_rollout(run.folder) == find_rollout(run.folder, 7)
    stored = load_rollout(path)
    assert stored.rows.ids == rows.ids and torch.equal(stored.rows.fingerprints, rows.fingerprints)
    assert [r.fields() for r in stored.rows.layouts] == [r.fields() for r in rows.layouts]
    for name, tensor in rows.segment.tensors().items():
        assert torch.equal(stored.rows.segment.tensors()[name], tensor), name
    assert sorted(stored.weights) == [0, 1]
    for version, weights in stored.weights.items():
        kept = run.stack.pushed.weights(version)
        assert all(torch.equal(weights[name], kept[name]) for name in kept)


def test_parity_replays_every_row_under_its_own_weights_and_agrees_to_the_bit(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    save_rollout(run.folder / "parity", 0, lagging_rollout(run), run.stack)
    assert main(["parity", str(run.folder)]) == 0
    text = capsys.readouterr().out
    assert "12 rows of weight versions [0, 1]" in text and "all 12 rows were laid out alike" in text
    assert all(f"{h}x{w}" in text for h, w in CANVASES) and "step 0" in text and "step 2" in text
    assert check_run(run.folder, micro_batch_size=1).drift.abs_dlogp_max == 0.0
    assert main(["parity", str(run.folder), "--dtype", "bfloat16"]) == 1
    assert "does NOT agree" in capsys.readouterr().out


def test_parity_names_the_worst_row_first_and_fails(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lagging_rollout(run)
    moved = rows.segment.log_probs.clone()
    moved[3, 1] += 2e-3
    moved[8, 0] -= 1e-3
    save_rollout(
        run.folder / "parity", 0, rows.replace(segment=rows.segment.replace(log_probs=moved)), run.stack
    )
    assert main(["parity", str(run.folder), "--rows", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if re.match(r"  r\d", line)]
    assert shown == ["r0.p1/1", "r1.p1/0"]
    assert any(line.split()[:2] == ["12x12", "8"] and "2.00e-03" in line for line in lines)


def test_parity_shows_the_table_of_a_layout_that_differs(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = lagging_rollout(run)
    save_rollout(run.folder / "parity", 0, rows.replace(prompts=("Three", *rows.prompts[1:])), run.stack)
    assert main(["parity", str(run.folder)]) == 1
    text = capsys.readouterr().out
    assert re.search(r"r0\.p0/0 +gen\.token_ids\[1\] +116 +84", text) and "1 of 12 rows" in text


def test_groups_that_wait_in_a_checkpoint_can_be_replayed_too(run: Run) -> None:
    rows = lagging_rollout(run)
    roots = Part(ids=("r0.p0",), prompts=("three",), metadata=({"canvas": [8, 8]},))
    waiting = Sample((roots, rows.select([0, 1])))
    root = run.folder / "checkpoints"
    run.side.prepare_save(str(root), 2, {}, [waiting], copied=False)()
    report = check_run(run.folder)
    assert report.agrees and report.drift.abs_dlogp_max == 0.0 and "2 rows" in report.text
    run.side.prepare_save(str(root), 3, {}, [], copied=False)()
    with pytest.raises(ValueError, match=r"step_000003 holds no generated rows.*parity\.store_interval: 1"):
        check_run(run.folder)
    assert check_run(run.folder, checkpoint="step_000002").agrees


def test_what_is_not_there_is_named(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(run.folder)]) == 2
    assert "no stored rollout and no checkpoint" in capsys.readouterr().err
    path = save_rollout(run.folder / "parity", 4, lagging_rollout(run), run.stack)
    with pytest.raises(ValueError, match=r"rollout 3 is not stored.*\[4\]"):
        find_rollout(run.folder, 3)
    file = path / "rows.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointDamaged, match=r"rows\.safetensors"):
        check_run(run.folder)


def test_full_weights_that_may_lag_are_refused_before_anything_starts() -> None:
    recipe = {
        "model": {"train": "full"},
        "parity": {"store_interval": 1},
        "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
    }
    check(parse(RunConfig, recipe), asynchronous=False)
    with pytest.raises(ValueError, match=r"parity\.store_interval.*model\.train: lora"):
        check(parse(RunConfig, recipe | {"weight_sync_interval": 2}), asynchronous=False)


@pytest.mark.slow
def test_a_run_stores_the_rollouts_it_is_asked_for(
    ray_cluster: None, random_base: Path, tmp_path: Path
) -> None:
    from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

    recipe = {
        "run_dir": str(tmp_path / "run"),
        "num_rollouts": 4,
        "batch_size": 3,
        "samples_per_prompt": 2,
        "num_devices": 2,
        "layout": "separate",
        "buffer_max_staleness": 1,
        "deterministic": True,
        "parity": {"store_interval": 2},
        "model": {"path": str(random_base), "lora": {"rank": 2, "alpha": 2}},
        "sampling": {"height": 12, "width": 12, "num_inference_steps": 3},
        "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
        "data": {"train": {"name": "digits_mixed"}},
        "logging": {"console": "plain", "tensorboard": False},
    }
    folder = AsyncDiffusionTrainer(parse(RunConfig, recipe)).run()
    assert sorted(p.name for p in (folder / "parity").glob("step_*")) == ["step_000000", "step_000002"]
    for number in (0, 2):
        report = check_run(folder, rollout=number)
        assert report.agrees and report.drift.abs_dlogp_max == 0.0
