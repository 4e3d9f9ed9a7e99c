# SPDX-License-Identifier: Apache-2.0
"""A run that stops and goes on equals one that did not stop, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipes import metrics, recipe
from safetensors.torch import load_file

from unirl.cli import main
from unirl.config import RunConfig
from unirl.metrics import read_samples
from unirl.train.checkpoint import CheckpointDamaged, list_checkpoints
from unirl.trainer.async_diffusion import AsyncDiffusionTrainer
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.session import Session

ASYNC = {"layout": "separate", "num_devices": 2}
TWENTY = {
    "num_rollouts": 20,
    "save_interval": 5,
    "eval_interval": 5,
    "optim__ema": {"decay": 0.9},
    "optim__warmup_steps": 8,
}
CASES = {
    "sync lora": (DiffusionTrainer, {"num_devices": 1}),
    "sync full": (DiffusionTrainer, {"num_devices": 1, "model__train": "full"}),
    "async lora on policy": (AsyncDiffusionTrainer, ASYNC),
    "async lora staleness 2": (
        AsyncDiffusionTrainer,
        {**ASYNC, "buffer_max_staleness": 2, "max_inflight": 2},
    ),
    "async full on policy": (AsyncDiffusionTrainer, {**ASYNC, "model__train": "full"}),
    "async full staleness 2": (
        AsyncDiffusionTrainer,
        {**ASYNC, "buffer_max_staleness": 2, "model__train": "full"},
    ),
}


class Stopped(Exception):  # noqa: N818 (an end that the test asks for)
    """What ends a run in the middle."""


def run_until(trainer: DiffusionTrainer, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets it train `last` rollouts and a part of the next one, whose work is lost."""
    write = Session.write

    def stop_after(session: Session, step: int) -> None:
        write(session, step)
        if step + 1 == last:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Session, "write", stop_after)
        with pytest.raises(Stopped):
            trainer.run()


def trained_ids(run: Path) -> list[tuple[Any, ...]]:
    """What tells one rollout from another: its rewards and norms, to the last bit. Seconds are not compared."""
    return [
        (m["step"], m["reward"], m["gn"], m["ratio"], m.get("eval/reward"))
        for m in metrics(run)
        if "reward" in m
    ]


def assert_same_checkpoint(want: Path, got: Path) -> None:
    for file in sorted(want.glob("*.safetensors")):
        if file.stem == "rng":
            continue
        left, right = load_file(file), load_file(got / file.name)
        assert left.keys() == right.keys(), file.name
        assert all(torch.equal(left[k], right[k]) for k in left), file.name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_twenty_rollouts_equal_ten_and_a_stop_and_ten(
    ray_cluster: None, random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Stopped after 13: the last three are lost and done again from checkpoint 10, in-flight work with them."""
    trainer, changes = CASES[case]
    changes = {**TWENTY, **changes}
    whole = trainer(recipe(random_base, tmp_path / "whole", **changes)).run()
    run_until(trainer(recipe(random_base, tmp_path / "parts", **changes)), 13, monkeypatch)
    assert [m["step"] for m in metrics(tmp_path / "parts")] == list(range(13))
    parts = trainer(recipe(random_base, tmp_path / "parts", resume="auto", **changes)).run()
    assert trained_ids(parts) == trained_ids(whole)
    assert [m["step"] for m in metrics(parts)] == list(range(21)), "one line a step"
    assert_same_checkpoint(whole / "checkpoints" / "step_000020", parts / "checkpoints" / "step_000020")
    left, right = (read_samples(run / "samples" / "eval_000020.npz") for run in (whole, parts))
    assert all((a == b).all() for a, b in zip(left.images, right.images, strict=True))


@pytest.fixture(scope="module")
def four(ray_cluster: None, random_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 1 to 4 would be there; 1 is pruned. Each step is evaluated."""
    folder = tmp_path_factory.mktemp("four") / "run"
    config = recipe(
        random_base, folder, num_rollouts=4, save_interval=1, eval_interval=1, checkpoint__keep_last=3
    )
    return DiffusionTrainer(config).run()


def as_of(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**saved, "run_dir": str(folder)}))
    return folder


def again(random_base: Path, folder: Path, **changes: Any) -> RunConfig:
    return recipe(
        random_base,
        folder,
        **{"num_rollouts": 4, "save_interval": 1, "eval_interval": 1, "resume": "auto", **changes},
    )


def test_the_last_checkpoints_and_the_best_by_evaluation_are_kept(four: Path) -> None:
    infos = {info.number: info for info in list_checkpoints(four / "checkpoints")}
    rewards = {m["step"]: m["eval/reward"] for m in metrics(four) if "eval/reward" in m}
    assert all(info.problem is None for info in infos.values())
    assert {number: info.score for number, info in infos.items()} == {n: rewards[n] for n in infos}
    # When 4 was written, 4 had no score yet: the best of 1 to 3 was kept beside the last three.
    best = max((1, 2, 3), key=lambda n: rewards[n])
    assert sorted(infos) == sorted({2, 3, 4, best})


def test_the_command_line_lists_and_verifies_them(
    four: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = as_of(four, tmp_path / "run")
    infos = list_checkpoints(run / "checkpoints")
    assert main(["checkpoints", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [info.path.name for info in infos]
    assert all(" whole" in line for line in lines[1:])
    assert [line.split()[0] for line in lines if "newest" in line] == ["step_000004"]
    best = max(infos, key=lambda info: info.score or 0.0)
    assert [line.split()[0] for line in lines if line.endswith("best")] == [best.path.name]
    shard = next((run / "checkpoints" / "step_000003").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (run / "checkpoints" / ".step_000005.partial").mkdir()
    assert main(["checkpoints", str(run)]) == 1
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "DAMAGED" in table["step_000003"] and shard.name in table["step_000003"]
    assert "DAMAGED" not in table["step_000004"] and "ignored" in table[".step_000005.partial"]
    assert main(["checkpoints", str(tmp_path / "nothing")]) == 2
    assert "nothing is no folder" in capsys.readouterr().err


def test_a_changed_recipe_is_refused_by_key_and_accepted_changes_are_told(
    four: Path, random_base: Path, tmp_path: Path
) -> None:
    folder = as_of(four, tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"(?s)optim\.lr: saved 0\.01, now 0\.5.*may change: .*num_rollouts"
    ) as caught:
        DiffusionTrainer(again(random_base, folder, optim__lr=0.5, seed=3, num_rollouts=6))
    assert "seed: saved 0, now 3" in str(caught.value) and "num_rollouts: saved" not in str(caught.value)
    plan = DiffusionTrainer(again(random_base, folder, num_rollouts=6, checkpoint__keep_last=7)).plan
    assert "changed: num_rollouts 4 -> 6" in plan.text and "changed: checkpoint.keep_last 3 -> 7" in plan.text
    assert f"resumed from checkpoint {folder}/checkpoints/step_000004" in plan.text


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_offered(
    four: Path, random_base: Path, tmp_path: Path
) -> None:
    folder = as_of(four, tmp_path / "run")
    file = folder / "checkpoints" / "step_000004" / "trained.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"step_000004 cannot be used: trained.*digest.*step_000003"):
        DiffusionTrainer(again(random_base, folder))
    shutil.rmtree(folder / "checkpoints" / "step_000004")
    (folder / "checkpoints" / "step_000003" / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"step_000003 cannot be used: .*not finished.*step_000002"):
        DiffusionTrainer(again(random_base, folder))


def test_going_back_to_an_earlier_checkpoint_sets_the_later_ones_aside(
    ray_cluster: None, four: Path, random_base: Path, tmp_path: Path
) -> None:
    folder = as_of(four, tmp_path / "run")
    first = str(folder / "checkpoints" / "step_000002")
    DiffusionTrainer(again(random_base, folder, resume=first, num_rollouts=3)).run()
    names = sorted(path.name for path in (folder / "checkpoints").glob("*step_*"))
    assert {"superseded_step_000003", "superseded_step_000004", "step_000002", "step_000003"} <= set(names)
    assert "step_000004" not in names
    assert [m["step"] for m in metrics(folder)] == [0, 1, 2, 3]


def test_another_runs_checkpoint_may_be_gone_on_from_in_a_new_folder_only(
    four: Path, random_base: Path, tmp_path: Path
) -> None:
    first = str(four / "checkpoints" / "step_000002")
    plan = DiffusionTrainer(again(random_base, tmp_path / "branch", resume=first)).plan
    assert f"resumed from checkpoint {first}" in plan.text
    with pytest.raises(ValueError, match="already holds a run"):
        DiffusionTrainer(again(random_base, as_of(four, tmp_path / "other"), resume=first))


def test_two_runs_do_not_share_a_folder(four: Path, random_base: Path, tmp_path: Path) -> None:
    folder = as_of(four, tmp_path / "run")
    trainer = DiffusionTrainer(again(random_base, folder))
    with trainer.plan.run_dir.claimed(), pytest.raises(ValueError, match="in use by another run"):
        trainer.run()


def test_a_checkpoint_is_the_same_bits_whether_it_is_written_beside_the_next_step_or_before_it(
    ray_cluster: None, four: Path, random_base: Path, tmp_path: Path
) -> None:
    config = recipe(
        random_base,
        tmp_path / "run",
        num_rollouts=4,
        save_interval=1,
        eval_interval=1,
        checkpoint__background=False,
    )
    run = DiffusionTrainer(config).run()
    for number in (2, 3, 4):
        assert_same_checkpoint(
            four / "checkpoints" / f"step_{number:06d}", run / "checkpoints" / f"step_{number:06d}"
        )
