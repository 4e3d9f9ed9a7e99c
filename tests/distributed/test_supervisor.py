# SPDX-License-Identifier: Apache-2.0
"""Dead and hung workers, on real processes of a real cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patients
import pytest
import ray
from patients import ward

from unirl.distributed.failures import WorkerDied, WorkerHung
from unirl.distributed.supervisor import Supervisor


@pytest.fixture
def open_ward(ray_cluster: None, tmp_path: Path) -> Iterator[Any]:
    patients.by_value()
    wards: list[Supervisor] = []

    def make(num: int, **options: Any) -> Any:
        supervisor, members = ward(tmp_path, num, **options)
        wards.append(supervisor)
        return supervisor, members

    yield make
    for supervisor in wards:
        supervisor.end()


def process_of(member: Any) -> int:
    return int(ray.get(member.actor.where.remote())[1])


def test_values_come_back_in_order_and_an_exception_as_itself(open_ward: Any) -> None:
    supervisor, (one, two) = open_ward(2)
    assert supervisor.get([one.add.remote(3), two.add.remote(4), one.add.remote(5)]) == [3, 4, 8]
    assert supervisor.get(two.add.remote(1)) == 5
    with pytest.raises(ArithmeticError, match="the loss is not finite"):
        supervisor.get([one.nap.remote(0.1), two.fail.remote("the loss is not finite")])
    assert supervisor.get(one.add.remote(0)) == 8, "an exception of a call is no death"


def test_a_dead_worker_is_named_within_seconds_with_its_log_and_cause(open_ward: Any) -> None:
    supervisor, (one, two) = open_ward(2)
    begin = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        supervisor.get([one.nap.remote(60.0), two.die.remote(0.2)])
    assert time.monotonic() - begin < 5
    text = str(caught.value)
    assert caught.value.worker == "patient 1" and "die" in caught.value.phase
    assert "patient 1 (process" in text and "SIGKILL" in text and "| about to end" in text
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="nothing is waited for after WorkerDied"):
        supervisor.get(one.nap.remote(60.0))
    assert time.monotonic() - begin < 1


def test_a_crash_in_native_code_is_told_from_a_kill(open_ward: Any) -> None:
    supervisor, (one,) = open_ward(1)
    with pytest.raises(WorkerDied, match="Segmentation fault"):
        supervisor.get(one.die.remote(0.0, signal.SIGSEGV))


def test_a_death_is_noticed_while_another_worker_is_waited_for(open_ward: Any) -> None:
    supervisor, (one, two) = open_ward(2)
    supervisor.get(two.add.remote(1))
    waiting = one.nap.remote(60.0)
    os.kill(process_of(two), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(WorkerDied, match="patient 1"):
        supervisor.wait([waiting])
    assert time.monotonic() - begin < 5


def test_a_peers_death_is_the_cause_and_a_ranks_own_error_the_note(open_ward: Any) -> None:
    """A collective whose peer died raises on the living rank first."""
    supervisor, (one, two) = open_ward(2)
    calls = [one.fail.remote("connection closed by peer"), two.die.remote(0.5)]
    with pytest.raises(WorkerDied, match="patient 1") as caught:
        supervisor.get(calls)
    assert any("connection closed by peer" in note for note in caught.value.__notes__)


def test_a_hung_worker_is_found_by_a_time_out_that_names_it_and_its_phase(open_ward: Any) -> None:
    supervisor, (one, two) = open_ward(2, timeout_s=4.0)
    begin = time.monotonic()
    with pytest.raises(
        WorkerHung, match=r"patient 1 .*asked for nap, it is at nap; the others: patient 0"
    ) as caught:
        supervisor.get([one.nap.remote(60.0, 0.1), two.nap.remote(60.0)])
    assert 4 <= time.monotonic() - begin < 12
    assert (caught.value.worker, caught.value.phase) == ("patient 1", "nap")


@pytest.mark.slow
def test_a_slow_worker_that_moves_and_an_idle_one_are_not_hung(open_ward: Any) -> None:
    supervisor, (one, two) = open_ward(2, timeout_s=2.5)
    assert (
        supervisor.get(one.nap.remote(6.0, 0.3)) == 6.0
    )  # patient 1 has stood still for so long, and was not asked
    assert supervisor.get(two.nap.remote(1.0)) == 1.0


@pytest.mark.slow
def test_a_stopped_process_is_found_and_killed(open_ward: Any) -> None:
    supervisor, (one,) = open_ward(1, timeout_s=3.0)
    pid = process_of(one)
    waiting = one.nap.remote(60.0, 0.1)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerHung, match="does not answer"):
        supervisor.get(waiting)
    supervisor.end()
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
            time.sleep(0.1)
        pytest.fail("the process is still there")


def test_a_worker_that_may_be_restarted_comes_back_and_its_calls_are_made_again(open_ward: Any) -> None:
    said: list[str] = []
    supervisor, (one, two) = open_ward(2, max_restarts=2, notice=said.append)
    asked = two.nap.options(num_returns=1).remote(60.0)
    lights, stores = [], []
    for request in "ab":
        light, store = one.pair.options(num_returns=2).remote(request)
        lights.append(light)
        stores.append(store)
    blocked = one.nap.remote(1.0)
    late, late_store = one.pair.options(num_returns=2).remote("c")
    supervisor.wait([lights[1]])
    os.kill(process_of_fast(one), signal.SIGKILL)
    # What had ended stays what it is; what had not is done again by the new process, which was revived first.
    assert supervisor.get([*lights, blocked, late]) == ["a:0", "b:0", 1.0, "c:100"]
    assert bytes(ray.get(supervisor.current(late_store))) == b"x" * 1000
    assert supervisor.num_restarts == 1 and "patient 0" in said[0] and "1 restart(s) left" in said[0]
    assert not supervisor.wait([asked], timeout=0)[0], "the other one goes on"


def process_of_fast(member: Any) -> int:
    """From what the supervisor knows: the actor is busy."""
    deadline = time.monotonic() + 30
    while not member.locate():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(member.where.split()[1])


def test_a_worker_that_keeps_dying_uses_up_the_restarts(open_ward: Any) -> None:
    supervisor, (one,) = open_ward(1, max_restarts=2, notice=lambda text: None)
    with pytest.raises(WorkerDied, match="patient 0"):
        supervisor.get(one.die.remote())
    assert supervisor.num_restarts == 2
