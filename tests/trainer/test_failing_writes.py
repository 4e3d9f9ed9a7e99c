# SPDX-License-Identifier: Apache-2.0
"""A disk that is full for a while, a folder that vanishes: the run goes on or stops, as configured, and says so."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recipes import metrics, recipe

from unirl.distributed.failpoints import VARIABLE
from unirl.distributed.failures import WriteFailed
from unirl.metrics import JsonlSink
from unirl.train.checkpoint import latest_checkpoint, list_checkpoints
from unirl.trainer.diffusion import DiffusionTrainer
from unirl.trainer.session import Session

FOUR = {"num_rollouts": 4, "save_interval": 1, "data__eval": {}}


def test_a_full_disk_costs_its_checkpoints_and_the_run_goes_on(
    ray_cluster: None,
    random_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Full within the second checkpoint, with room again before the fourth."""
    monkeypatch.setenv(VARIABLE, "worker-0:checkpoint.section:8:fill,worker-0:save:4:clear")
    config = recipe(random_base, tmp_path / "run", checkpoint__on_error="continue", **FOUR)
    run = DiffusionTrainer(config).run()
    infos = list_checkpoints(run / "checkpoints")
    assert [(info.number, info.problem) for info in infos] == [(1, None), (4, None)]
    assert not list((run / "checkpoints").glob(".step*")), "nothing half-written stays"
    said = capsys.readouterr().out
    assert "checkpoint 2 could not be written" in said and "the run goes on" in said
    lines = metrics(run)
    assert [m["step"] for m in lines] == [0, 1, 2, 3]
    assert lines[-1]["checkpoint/failed_writes"] == 2


def test_a_full_disk_stops_the_run_where_that_is_asked_for(
    ray_cluster: None, random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "worker-0:checkpoint.section:8:fill")
    config = recipe(random_base, tmp_path / "run", checkpoint__on_error="stop", **FOUR)
    with pytest.raises(WriteFailed, match=r"checkpoint 2 could not be written .*the run stops"):
        DiffusionTrainer(config).run()
    newest = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == "step_000001"
    monkeypatch.delenv(VARIABLE)
    run = DiffusionTrainer(recipe(random_base, tmp_path / "run", resume="auto", **FOUR)).run()
    assert [m["step"] for m in metrics(run)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_vanished_folder_is_reported_and_its_checkpoints_come_back_with_it(
    ray_cluster: None, random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    write = Session.write

    def vanish(session: Session, step: int) -> None:
        write(session, step)
        if step == 0:
            session.settle_checkpoint()
            folder.rename(tmp_path / "away")
            folder.symlink_to(tmp_path / "nowhere")
        if step == 2:
            folder.unlink()
            shutil.move(tmp_path / "away", folder)

    monkeypatch.setattr(Session, "write", vanish)
    config = recipe(
        random_base,
        tmp_path / "run",
        checkpoint__on_error="continue",
        checkpoint__background=False,
        **FOUR,
    )
    run = DiffusionTrainer(config).run()
    assert [(i.number, i.problem) for i in list_checkpoints(run / "checkpoints")] == [(1, None), (4, None)]
    assert metrics(run)[-1]["checkpoint/failed_writes"] == 2


def test_metrics_that_cannot_be_written_are_treated_alike(
    ray_cluster: None, random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(sink: JsonlSink, step: int, numbers: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlSink, "write", no_room)
    config = recipe(random_base, tmp_path / "run", **{**FOUR, "num_rollouts": 1})
    with pytest.raises(WriteFailed, match=r"the metrics could not be written .*No space left"):
        DiffusionTrainer(config).run()
