# SPDX-License-Identifier: Apache-2.0
"""Recipes, data and checkpoints from strangers run no code, and secrets stay where they are."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from unirl.config import RunConfig, parse
from unirl.entry import read_recipe
from unirl.train.checkpoint import CheckpointDamaged, load_checkpoint, save_checkpoint
from unirl.trainer.preflight import preflight

PACKAGE = Path(__file__).resolve().parents[1] / "unirl"
LOADS_CODE = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def imported(tree: ast.AST) -> set[str]:
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    return names | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def called(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not {name.split(".")[0] for name in imported(tree)} & LOADS_CODE, path
        assert not called(tree) & {"eval", "exec", "torch.load", "yaml.load", "hydra.utils.instantiate"}, path


def test_a_checkpoint_with_a_pickle_among_its_files_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"trained": {"w": torch.ones(2)}}, {})
    trap = path / "ran"
    torch.save({"w": torch.ones(2)}, path / "trained.safetensors")
    with pytest.raises(CheckpointDamaged):
        load_checkpoint(path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert not trap.exists() and set(manifest) == {"format", "number", "score", "sections", "files"}


RECIPE: dict[str, Any] = {
    "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
    "data": {"train": {"name": "digits"}},
}


@pytest.mark.parametrize(
    "extra",
    [
        {"_target_": "os.system"},
        {"model": {"_target_": "os.system"}},
        {"reward": {"scorers": [{"name": "jpeg_compressibility", "options": {"_target_": "os.system"}}]}},
    ],
    ids=["at the top", "in a section", "in a scorer's options"],
)
def test_a_target_is_an_unknown_key_like_any_other(extra: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_target_"):
        preflight(parse(RunConfig, {**RECIPE, "run_dir": str(tmp_path / "run"), **extra}), asynchronous=False)


def test_code_outside_the_package_is_imported_only_where_the_recipe_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stranger.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {
        **RECIPE,
        "reward": {"scorers": [{"name": "stranger:Scorer"}]},
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.raises(
        ValueError, match=r"reward\.scorers\[0\]\.name is 'stranger:Scorer'.*allow_code: true"
    ):
        preflight(parse(RunConfig, recipe), asynchronous=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(
        ValueError, match="cannot be imported"
    ):  # it has no such class; but now it was imported
        preflight(parse(RunConfig, {**recipe, "allow_code": True}), asynchronous=False)
    assert (tmp_path / "ran").exists()


def test_a_recipe_file_cannot_make_hydra_call_anything(tmp_path: Path) -> None:
    trap = {"_target_": "os.mkdir", "path": str(tmp_path / "ran")}
    stranger = {"hydra": {"callbacks": {"trap": trap}}, "seed": 3}
    (tmp_path / "stranger.yaml").write_text("# @package _global_\n" + yaml.safe_dump(stranger))
    assert read_recipe(["-cd", str(tmp_path), "-cn", "stranger"]) == {"seed": 3}
    assert not (tmp_path / "ran").exists()


def test_a_recipe_cannot_read_a_secret_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    monkeypatch.setenv("RUNS", "somewhere")
    (tmp_path / "thief.yaml").write_text("# @package _global_\nrun_dir: runs/${oc.env:WANDB_API_KEY}\n")
    with pytest.raises(Exception, match="WANDB_API_KEY, whose name is that of a secret") as caught:
        read_recipe(["-cd", str(tmp_path), "-cn", "thief"])
    assert "s3cr3t" not in str(caught.value)
    (tmp_path / "honest.yaml").write_text("# @package _global_\nrun_dir: ${oc.env:RUNS}/a\n")
    assert read_recipe(["-cd", str(tmp_path), "-cn", "honest"]) == {"run_dir": "somewhere/a"}


@pytest.mark.slow
def test_a_cluster_of_a_runs_own_has_no_dashboard_and_asks_for_a_token(tmp_path: Path) -> None:
    program = """if True:
        import os, subprocess, sys, ray
        from unirl.config import RunConfig
        from unirl.distributed.cluster import cluster
        with cluster(RunConfig()):
            print("dashboard", repr(ray._private.worker._global_node.webui_url))
            environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
            stranger = f"import ray; ray.init(address={ray.get_runtime_context().gcs_address!r}); print('got in')"
            done = subprocess.run([sys.executable, "-c", stranger], env=environment, capture_output=True, text=True)
            print("stranger", done.returncode != 0, "got in" in done.stdout)
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200
    )
    assert "stranger True False" in done.stdout, done.stdout + done.stderr
    assert "dashboard ''" in done.stdout or "dashboard None" in done.stdout, done.stdout
