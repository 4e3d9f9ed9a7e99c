# SPDX-License-Identifier: Apache-2.0
"""Starting or joining a Ray cluster, leaving nothing of it behind, and refusing at once what it cannot give."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from unirl.config import RunConfig
from unirl.distributed.failures import ClusterRefusal, last_lines

HEAD_PROCESSES = ("gcs_server", "raylet")
END_TIMEOUT_S = 30.0
LONGEST_ROOT = 20
"""Characters of the folder that session folders are in: a socket's path has 107, and Ray's names below it take the others."""
_SESSION_PREFIX = "unirl-ray-"
_own: Any = None
"""The head node of the cluster that this process started, while there is one."""
_abandoned = False


@dataclasses.dataclass(frozen=True)
class Devices:
    """What one worker takes: a GPU where the nodes have any, else `threads` CPU cores."""

    kind: str
    per_node: tuple[tuple[str, int], ...]

    @property
    def available(self) -> int:
        return sum(count for _, count in self.per_node)


@contextlib.contextmanager
def cluster(config: RunConfig) -> Iterator[None]:
    """A cluster of this run's own, or the one at `ray_address`. A process that is connected already stays with that one.

    A cluster of our own has no dashboard, and its own ports and session folder, so that two runs on a host do not meet; Ray's
    token authentication stays as Ray has it, which is on. On the way out its processes end and its folder is removed.
    """
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": True,
    }
    if config.ray_address:
        try:
            with _handlers_kept():
                ray.init(address=config.ray_address, **common)
        except (ConnectionError, ValueError) as error:
            raise ClusterRefusal(f"ray_address is {config.ray_address!r}: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    _refuse_too_many_for_this_host(config)
    with _session_folder() as folder, _own_cluster(config, folder, common):
        yield


def lost_processes() -> str:
    """Which processes of our own cluster have ended unexpectedly, with the end of their logs; empty while all is well."""
    if _own is None:
        return ""
    lost = [kind for kind, _ in _own.dead_processes() if kind in HEAD_PROCESSES]
    logs = Path(_own.get_logs_dir_path())
    return "; ".join(
        f"{kind} (the end of its log: {' / '.join(last_lines(logs / f'{kind}.out')[-3:]) or 'empty'})"
        for kind in lost
    )


def find_devices(config: RunConfig, nodes: Sequence[dict[str, Any]] | None = None) -> Devices:
    """The devices that the cluster's nodes have. Raises `ClusterRefusal` when they are fewer than `num_devices`.

    The error names asked, available and what each node has; nothing waits for resources that do not exist.
    """
    alive = [n for n in (ray.nodes() if nodes is None else nodes) if n["Alive"]]
    gpus = tuple((_name(n), int(n["Resources"].get("GPU", 0))) for n in alive)
    if any(count for _, count in gpus):
        devices = Devices("GPU", gpus)
    else:
        cpus = tuple(
            (_name(n), int(n["Resources"].get("CPU", 0)) // config.threads_per_worker) for n in alive
        )
        devices = Devices("CPU", cpus)
    if len(alive) < config.num_nodes or devices.available < config.num_devices:
        raise refusal(config, devices)
    return devices


def refusal(config: RunConfig, devices: Devices, why: str = "") -> ClusterRefusal:
    """The error that names what was asked, what there is in all and on each node, and what to change."""
    nodes = ", ".join(f"{name}: {count}" for name, count in devices.per_node)
    unit = "GPUs" if devices.kind == "GPU" else f"workers of {config.threads_per_worker} core(s)"
    return ClusterRefusal(
        f"num_devices asks for {config.num_devices} on {config.num_nodes} node(s); available: {devices.available} {unit} "
        f"on {len(devices.per_node)} node(s) ({nodes}){why and '; ' + why}; lower num_devices, num_nodes or threads_per_worker, "
        "or set ray_address to a larger cluster"
    )


def _refuse_too_many_for_this_host(config: RunConfig) -> None:
    needed = config.num_devices * config.threads_per_worker
    cores = os.cpu_count() or 1
    if needed > cores and not _gpus_here():
        raise refusal(config, Devices("CPU", (("this host", cores // config.threads_per_worker),)))


@contextlib.contextmanager
def _own_cluster(config: RunConfig, folder: str, common: dict[str, Any]) -> Iterator[None]:
    global _own
    with _handlers_kept():
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, config.num_devices * config.threads_per_worker),
            include_dashboard=False,
            _temp_dir=folder,
            **common,
        )
    _own = ray._private.worker._global_node
    try:
        yield
    finally:
        _leave()


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Signals do after the block what they did before it: Ray takes SIGTERM for itself, and then aborts on it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ask_at_the_end(call: Callable[[], object]) -> None:
    """A call into Ray on the way out; raises what the call raises.

    A cluster that is gone is not asked, and one that goes meanwhile is not waited for: such calls block until Ray, after a minute,
    ends the process.
    """
    if lost_processes():
        return
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    deadline = time.monotonic() + END_TIMEOUT_S
    while thread.is_alive() and time.monotonic() < deadline and not lost_processes():
        thread.join(0.1)
    if raised:
        raise raised[0]


def is_abandoned() -> bool:
    """Whether this process left a cluster that was gone: Ray must not be asked to say goodbye to it either."""
    return _abandoned


def _leave() -> None:
    """Ends our own cluster: by Ray's way, or, when that is not to be had, by ending its processes."""
    global _own, _abandoned
    ask_at_the_end(ray.shutdown)
    if lost_processes():
        _abandoned = True
        below = _descendants({process.pid for _, process in _own.live_processes()})
        _own.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for pid in below:  # a raylet that is killed does not end its helpers
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    _own = None


def _descendants(pids: set[int]) -> set[int]:
    """The processes below the given ones on this host."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in pids | found} - found - pids:
        found |= more
    return found


@contextlib.contextmanager
def _session_folder() -> Iterator[str]:
    """A folder for a cluster's sockets and logs, locked while this process lives.

    Those of processes that were killed are removed on the way: their locks are free.
    """
    root = _short_folder()
    for left in root.glob(f"{_SESSION_PREFIX}*"):
        _remove_if_abandoned(left)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_SESSION_PREFIX}", dir=root))
    with (hidden / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = hidden.rename(
            hidden.with_name(hidden.name.removeprefix("."))
        )  # now others may find it, locked
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> Path:
    """Where session folders go: `RAY_TMPDIR`, else the temporary directory, else /tmp. A socket's path is limited in length."""
    asked = os.environ.get("RAY_TMPDIR")
    if asked and len(asked) > LONGEST_ROOT:
        raise ClusterRefusal(
            f"RAY_TMPDIR is {asked!r}, {len(asked)} characters; Ray's sockets below it would have too long a path, allowed are "
            f"{LONGEST_ROOT}: set it to a shorter one, or not at all"
        )
    temporary = tempfile.gettempdir()
    return Path(asked or (temporary if len(temporary) <= LONGEST_ROOT else "/tmp"))


def _remove_if_abandoned(folder: Path) -> None:
    try:
        with (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # in use, somebody else's, or being made
        return


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


def _gpus_here() -> bool:
    import torch

    return torch.cuda.is_available()
