# SPDX-License-Identifier: Apache-2.0
"""How a run's process ends, through the real command line, on a cluster of its own; and that nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes import recipe

from unirl.config import to_plain
from unirl.distributed.failpoints import VARIABLE
from unirl.entry import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_WORKER_LOST,
    EXIT_WRONG_INPUT,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ASYNC = {
    "layout": "separate",
    "num_devices": 2,
    "buffer_max_staleness": 1,
    "save_interval": 1,
    "num_rollouts": 6,
}


class Command:
    """`python -m unirl.train_async_diffusion` with a small recipe, in a process group and a temporary folder of its own."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.folder, self.base = folder, base
        self.scratch = Path(tempfile.mkdtemp(prefix="u", dir="/tmp"))  # short, for the paths of sockets
        self.process: Any = None

    def start(self, failpoint: str = "", *overrides: str, **changes: Any) -> subprocess.Popen[str]:
        config = recipe(self.base, self.folder / "run", **{**ASYNC, **changes})
        (self.folder / "small.yaml").write_text("# @package _global_\n" + yaml.safe_dump(to_plain(config)))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment |= {"RAY_TMPDIR": str(self.scratch), "RAY_USAGE_STATS_ENABLED": "0", VARIABLE: failpoint}
        if not failpoint:
            del environment[VARIABLE]
        command = [
            sys.executable,
            "-m",
            "unirl.train_async_diffusion",
            "-cd",
            str(self.folder),
            "-cn",
            "small",
        ]
        self.process = subprocess.Popen(
            [*command, *overrides],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self.process

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=200)
        return self.process.returncode, output

    def until(self, text: str) -> str:
        """Reads what the process prints up to a line with `text`."""
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} was not printed:\n{seen}")

    def processes(self) -> list[tuple[int, str]]:
        """Every process, alive, that is of this run: its session folder is in its command line or environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (os.getpid(), self.process.pid):
                continue
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if str(self.scratch).encode() in words:
                    found.append((int(entry.name), words.split(b"\0")[0].decode(errors="replace")))
        return found

    def assert_nothing_is_left(self, *, folder_too: bool = True, timeout_s: float = 60.0) -> None:
        """No process, so no port and no shared memory of theirs; and no session folder."""
        deadline = time.monotonic() + timeout_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.3)
        if folder_too:
            assert list(self.scratch.iterdir()) == []


@pytest.fixture
def command(random_base: Path, tmp_path: Path) -> Iterator[Command]:
    made = Command(random_base, tmp_path)
    yield made
    if made.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
    shutil.rmtree(made.scratch, ignore_errors=True)


def test_a_dead_training_worker_ends_the_run_with_its_name_and_a_folder_to_resume(command: Command) -> None:
    command.start("train-0:train.micro:6:kill")
    code, output = command.end()
    assert code == EXIT_WORKER_LOST, output
    assert "error: train worker 0 (process" in output and "(at train.micro)" in output and "SIGKILL" in output
    assert "resume=auto goes on from" in output
    command.assert_nothing_is_left()


def test_a_hung_worker_ends_the_run_with_its_rank_and_phase(command: Command) -> None:
    begin = time.monotonic()
    command.start("train-0:train.micro:6:stop", worker_timeout_s=5.0)
    code, output = command.end()
    assert code == EXIT_WORKER_LOST, output
    assert (
        "train worker 0 (process" in output
        and "has not moved for" in output
        and "it is at train.micro" in output
    )
    assert time.monotonic() - begin < 150
    command.assert_nothing_is_left()


def test_an_exception_in_training_while_a_generation_runs_is_what_is_seen(command: Command) -> None:
    command.start("train-0:train.micro:6:raise")
    code, output = command.end()
    assert code == EXIT_FAILED, output
    assert "Traceback" in output
    assert "error: the run failed: RuntimeError: failpoint train-0:train.micro:6:raise" in output
    assert "in _micro" in output, "the worker's own traceback"
    command.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "exit_code", "send"),
    [
        (signal.SIGINT, EXIT_INTERRUPTED, os.killpg),
        (signal.SIGTERM, EXIT_TERMINATED, os.kill),
        (signal.SIGTERM, EXIT_TERMINATED, os.killpg),
    ],
)
def test_ctrl_c_and_sigterm_end_cleanly_and_the_run_goes_on(
    command: Command, number: signal.Signals, exit_code: int, send: Callable[[int, int], None]
) -> None:
    """To the run alone, and, as terminals and job schedulers send them, to all processes of its group, Ray's among them."""
    command.start(num_rollouts=400)
    command.until("3/400")
    send(command.process.pid, number)
    code, output = command.end()
    assert code == exit_code, output
    assert "ending: what is in flight" in output and "resume=auto goes on from" in output
    command.assert_nothing_is_left()


@pytest.mark.parametrize("head", ["gcs_server", "raylet"])
def test_a_lost_ray_head_is_named_and_the_run_ends(command: Command, head: str) -> None:
    command.start(num_rollouts=400)
    command.until("3/400")
    (pid,) = [pid for pid, name in command.processes() if name.endswith(head)]
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    code, output = command.end()
    assert code == EXIT_WORKER_LOST, output
    assert f"the Ray cluster is gone: {head}" in output and "resume=auto goes on from" in output
    assert time.monotonic() - begin < 60
    command.assert_nothing_is_left()


def test_a_killed_driver_leaves_no_process_and_its_folder_goes_with_the_next_run(command: Command) -> None:
    command.start(num_rollouts=400)
    command.until("3/400")
    command.process.kill()
    command.process.wait()
    # An agent of Ray that has a raylet's end to report to a control store that is gone as well tries for 60 s.
    command.assert_nothing_is_left(folder_too=False, timeout_s=90.0)
    assert len(list(command.scratch.iterdir())) == 1
    steps = [
        json.loads(line)["step"]
        for line in (command.folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps[:3] == [0, 1, 2]
    command.start("", "resume=auto", num_rollouts=len(steps) + 1)
    code, output = command.end()
    assert code == 0, output
    command.assert_nothing_is_left()


def test_more_devices_than_there_are_end_with_one_message_at_once(command: Command) -> None:
    command.start(num_devices=64, batch_size=40)
    code, output = command.end()
    assert code == EXIT_WRONG_INPUT
    assert "num_devices asks for 64" in output and "available" in output and "Traceback" not in output
    assert not (command.folder / "run").exists()
    command.assert_nothing_is_left()


def test_a_temporary_folder_that_is_too_long_for_sockets_is_refused_by_name(command: Command) -> None:
    command.scratch = command.scratch / ("long" * 20)
    command.start()
    code, output = command.end()
    assert code == EXIT_WRONG_INPUT and "RAY_TMPDIR is" in output and "Traceback" not in output
    command.scratch = command.scratch.parent


def test_two_runs_at_once_on_one_host_do_not_meet(
    command: Command, random_base: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Command(random_base, tmp_path / "other")
    try:
        command.start(num_rollouts=3)
        other.start(num_rollouts=3)
        for one in (command, other):
            code, output = one.end()
            assert code == 0, output
        left, right = (
            one.folder / "run" / "adapter" / "adapter_model.safetensors" for one in (command, other)
        )
        assert left.read_bytes() == right.read_bytes()
        command.assert_nothing_is_left()
        other.assert_nothing_is_left()
    finally:
        other.process.kill()
        other.process.wait()
        shutil.rmtree(other.scratch, ignore_errors=True)
