# SPDX-License-Identifier: Apache-2.0
"""What the training entries say about a recipe's name and about how a run ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from unirl.config import RunConfig
from unirl.entry import EXIT_FAILED, read_recipe, run_recipe
from unirl.train.checkpoint import save_checkpoint


def ending(run_dir: Path, error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said under the traceback when a run ends with `error`."""

    class Fails:
        def __init__(self, config: RunConfig) -> None:
            pass

        def run(self) -> Path:
            raise error

    assert run_recipe({"run_dir": str(run_dir)}, Fails) == EXIT_FAILED  # type: ignore[arg-type]
    return capsys.readouterr().err.rpartition("\nerror: ")[2]


def test_a_run_that_is_done_is_done_without_a_report_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        def __init__(self, config: RunConfig) -> None:
            self.folder = Path(config.run_dir)

        def run(self) -> Path:
            self.folder.mkdir()
            (self.folder / "metrics.jsonl").write_text("torn by a crash\n")
            return self.folder

    assert run_recipe({"run_dir": str(tmp_path / "run")}, Done) == 0  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert "metrics.jsonl:1" in said and "unirl report" in said and "Traceback" not in said


def test_what_a_worker_raised_is_named_with_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raised = RayTaskError("generate", "Traceback ...", KeyError("no such prompt"))
    again = RayTaskError("collect", "Traceback ...", raised.as_instanceof_cause()).as_instanceof_cause()
    said = ending(tmp_path / "run", again, capsys)
    assert said.startswith("the run failed: KeyError: 'no such prompt'\n")
    assert ending(tmp_path / "run", OSError(28, "full"), capsys).startswith(
        "the run failed: OSError: [Errno 28]"
    )


def test_only_a_checkpoint_is_gone_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ending(tmp_path, RuntimeError("a"), capsys)
    assert "holds no checkpoint" in said and "start again" in said and "goes on" not in said
    path = save_checkpoint(tmp_path / "checkpoints", 3, {}, {})
    assert f"resume=auto goes on from {path}" in ending(tmp_path, RuntimeError("a"), capsys)


@pytest.mark.parametrize("name", ["digits_async", "diffusion/digits/digits_asink", "diffusion/digits_async"])
def test_an_unknown_recipe_suggests_the_nearest(name: str) -> None:
    with pytest.raises(ValueError, match=r"did you mean diffusion/digits/digits_async\?$") as refused:
        read_recipe(["--config-name", name])
    assert "diffusion/digits/digits_sync" in str(refused.value) and "Hydra" not in str(refused.value)


def test_recipes_of_ones_own_are_named_beside_the_shipped_ones(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("# @package _global_\ndefaults: [/diffusion/digits/digits_sync, _self_]\nseed: 7\n")
    recipe = read_recipe(["--config-dir", str(tmp_path), "--config-name", "mine.yaml"])
    assert recipe["seed"] == 7 and recipe["data"]["train"]["name"] == "digits"
    with pytest.raises(ValueError, match=rf"recipes in {tmp_path} and .*: mine, .*did you mean mine\?$"):
        read_recipe(["--config-dir", str(tmp_path), "--config-name", "min"])
    with pytest.raises(ValueError, match=r"--config-dir: .*nowhere is no folder"):
        read_recipe(["--config-dir", str(tmp_path / "nowhere"), "--config-name", "mine"])


@pytest.mark.parametrize("override", ["hydra.foo=1", "++hydra.job.name=x", "hydra/launcher=other", "~hydra"])
def test_a_key_of_hydra_is_refused_because_nothing_would_come_of_it(override: str) -> None:
    with pytest.raises(ValueError, match=r"sets a key of Hydra.*allowed: keys of the recipe"):
        read_recipe(["--config-name=diffusion/digits/digits_sync", override])
