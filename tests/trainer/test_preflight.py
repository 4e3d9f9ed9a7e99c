# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a recipe or its files is said before anything starts, and the run directory stays as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes import recipe
from safetensors.torch import load_file, save_file

from unirl.config import RunConfig, to_plain
from unirl.distributed.failures import Refusal
from unirl.entry import EXIT_WRONG_INPUT, run_recipe
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.rundir import RunDir


def refused(base: Path, run_dir: Path, message: str, **changes: Any) -> None:
    import ray

    alive = ray.is_initialized()
    with pytest.raises(ValueError, match=message):
        DiffusionTrainer(recipe(base, run_dir, **changes))
    assert ray.is_initialized() == alive
    assert not run_dir.exists()


def test_a_missing_weight_file_names_the_path_and_the_setting(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, tmp_path / "run", rf"model\.path.*{empty}")


def test_weights_of_another_model_are_found_by_their_shapes(random_base: Path, tmp_path: Path) -> None:
    tensors = load_file(random_base / "model.safetensors")
    name = "language_model.model.norm.weight"
    folder = tmp_path / "other"
    folder.mkdir()
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors")
    refused(folder, tmp_path / "run", rf"model\.preset 'bagel-digits'.*{name} \(file \[63\], model \[64\]\)")


def test_adapter_targets_that_match_nothing_are_found_before_a_worker_starts(
    random_base: Path, tmp_path: Path
) -> None:
    refused(
        random_base,
        tmp_path / "run",
        r"model\.lora\.targets \['nothing'\] match no linear layer",
        model__lora__targets=["nothing"],
    )


def test_an_unreadable_dataset_row_names_file_and_line(random_base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a three"}\n{"prompt": 3}\n')
    refused(
        random_base, tmp_path / "run", r"rows\.jsonl, line 2: prompt is 3", data__train={"path": str(rows)}
    )


def test_an_unsupported_canvas_names_row_canvas_and_bound(random_base: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a three"}\n{"prompt": "a four", "metadata": {"canvas": [16, 16]}}\n')
    refused(
        random_base,
        tmp_path / "run",
        r"rows\.jsonl, row 2.*canvas \[16, 16\] has 64 tokens.*\[8, 8\] has 16",
        data__train={"path": str(rows)},
    )


def test_an_unknown_scorer_suggests_the_nearest(random_base: Path, tmp_path: Path) -> None:
    refused(
        random_base,
        tmp_path / "run",
        "did you mean 'jpeg_compressibility'",
        reward={"scorers": [{"name": "jpeg_compresibility"}]},
    )


def test_reward_weights_that_are_missing_name_path_and_setting(random_base: Path, tmp_path: Path) -> None:
    scorer = {"name": "digit_probability", "options": {"weights": "/nowhere/scorer.safetensors"}}
    refused(random_base, tmp_path / "run", r"/nowhere/scorer\.safetensors", reward={"scorers": [scorer]})


def test_a_folder_that_holds_a_run_is_not_overwritten(random_base: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=r"already holds a run.*resume: auto"):
        DiffusionTrainer(recipe(random_base, run_dir))
    assert (run_dir / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_a_wrong_recipe_ends_with_its_own_exit_code_and_one_message(
    random_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = to_plain(recipe(random_base, tmp_path / "run")) | {"num_rolouts": 3}
    assert run_recipe(plain, DiffusionTrainer) == EXIT_WRONG_INPUT
    assert "did you mean 'num_rollouts'" in capsys.readouterr().err


def test_a_dry_run_prints_plan_and_recipe_and_writes_nothing(
    random_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe(random_base, tmp_path / "run", dry_run=True)
    assert run_recipe(to_plain(config), DiffusionTrainer) == 0
    printed = capsys.readouterr().out
    assert "3 rollouts of 2 prompts x 4 siblings = 8 rows" in printed.splitlines()[0]
    assert "; evaluation: seen (3 of 10 prompts)" in printed.splitlines()[1]
    assert "num_rollouts: 3" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("inside", ["a_file", "a_file/run", "/proc/run", "/dev/null"])
def test_a_run_dir_that_cannot_be_written_to_is_one_message_and_exit_code_2(
    random_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], inside: str
) -> None:
    (tmp_path / "a_file").write_text("mine")
    folder = tmp_path / inside
    assert (
        run_recipe(to_plain(recipe(random_base, folder, dry_run=True)), DiffusionTrainer) == EXIT_WRONG_INPUT
    )
    said = capsys.readouterr().err
    assert f"run_dir {str(folder)!r} cannot be written to" in said and said.count("\n") == 1
    with pytest.raises(Refusal, match="change run_dir"), RunDir(folder).claimed():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_asking_whether_a_run_dir_can_be_written_to_leaves_nothing_behind(tmp_path: Path) -> None:
    RunDir(tmp_path / "new" / "run").check_writable()
    assert not list(tmp_path.iterdir())


def begun(base: Path, folder: Path) -> RunConfig:
    """A run that left its recipe and no checkpoint, to be gone on with."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(recipe(base, folder))))
    return recipe(base, folder, resume="auto")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "it is empty"), (b"- a\n", "holds a list"), (b"a: [1\n", "not YAML"), (b"a: \xff\n", "not UTF-8")],
)
def test_a_run_with_a_damaged_recipe_is_not_gone_on_with_and_the_file_is_named(
    random_base: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    config = begun(random_base, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"run/config\.yaml is not the recipe that a run saved: .*{message}"
    ):
        DiffusionTrainer(config)


def test_a_broken_line_of_metrics_is_named_before_a_resumed_run_starts(
    random_base: Path, tmp_path: Path
) -> None:
    config = begun(random_base, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n{"reward": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        DiffusionTrainer(config)


def test_a_half_written_last_line_of_metrics_is_dropped_when_the_run_goes_on(
    random_base: Path, tmp_path: Path
) -> None:
    config = begun(random_base, tmp_path / "run")
    lines = '{"step": 0, "note": "\u2028"}\n{"step": 1}\n'.encode()
    (tmp_path / "run" / "metrics.jsonl").write_bytes(lines + '{"step": 2, "note": "é'.encode()[:-1])
    run_dir = DiffusionTrainer(config).plan.run_dir
    run_dir.create(config, "plan", first_rollout=1)
    assert run_dir.metrics_file.read_text() == '{"step": 0, "note": "\u2028"}\n'


def test_a_setting_without_effect_is_a_warning_in_the_plan(random_base: Path, tmp_path: Path) -> None:
    plan = DiffusionTrainer(
        recipe(random_base, tmp_path / "run", max_inflight=2, weight_sync_interval=9)
    ).plan
    assert "warning: max_inflight is 2 and does nothing in the sync trainers" in plan.text
    assert "warning: weight_sync_interval is 9 and num_rollouts 3" in plan.text
    assert "warning" not in DiffusionTrainer(recipe(random_base, tmp_path / "run")).plan.text


def test_a_default_canvas_that_the_model_does_not_have_names_its_keys(
    random_base: Path, tmp_path: Path
) -> None:
    refused(
        random_base, tmp_path / "run", r"pixel stride 2; change sampling\.height/width", sampling__height=9
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits_sync", "digits_separate", "digits_async", "digits_mixed"])
def test_every_recipe_composes_and_passes_its_checks(name: str) -> None:
    entry = "train_diffusion" if name in ("digits_sync", "digits_separate") else "train_async_diffusion"
    command = [
        sys.executable,
        "-m",
        f"unirl.{entry}",
        f"--config-name=diffusion/digits/{name}",
        "dry_run=true",
    ]
    done = subprocess.run([*command, "run_dir=/tmp/never_made"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    resolved = subprocess.run(
        [*command, "--cfg", "job", "--resolve"], capture_output=True, text=True, timeout=120
    )
    assert resolved.returncode == 0 and "clip_range: 0.005" in resolved.stdout
