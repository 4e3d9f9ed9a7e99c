# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a run under supervision, and sees to it that all of them end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unirl.config import RunConfig
from unirl.distributed.cluster import Devices
from unirl.distributed.member import Member
from unirl.distributed.placement import Placement, placed
from unirl.distributed.process import as_actor
from unirl.distributed.slabs import RolloutSlab, TrainSlab
from unirl.distributed.supervisor import Supervisor
from unirl.distributed.teardown import ended_by
from unirl.distributed.workers import Worker


@contextmanager
def slabs(
    config: RunConfig, devices: Devices, logs: Path, notice: Callable[[str], None] = print
) -> Iterator[tuple[TrainSlab, RolloutSlab, Supervisor]]:
    """Places and builds all workers; on the way out they end and their devices are given back.

    Args:
        logs: a folder for a file of output a worker.
        notice: told when a worker is restarted.
    """
    supervisor = Supervisor(
        timeout_s=config.worker_timeout_s, max_restarts=config.max_worker_restarts, notice=notice
    )
    with placed(config, devices) as placement, ended_by("ending the workers", supervisor.end):
        num_train, _ = config.slab_sizes()
        members = [
            supervisor.add(_member(config, placement, index, num_train, logs.resolve()))
            for index in range(config.num_devices)
        ]
        trainers = members[:num_train]
        rollouts = members if config.layout == "colocate" else members[num_train:]
        address = supervisor.get(trainers[0].open_store.remote(num_train)) if num_train > 1 else None
        supervisor.get([m.build.remote(address, num_train) for m in members])
        rollout = RolloutSlab(rollouts, config, supervisor)
        if config.max_worker_restarts:
            for member in rollouts:
                member.revive = partial(_revive, rollout=rollout)
        if config.reward_stack.schedule is not None and config.layout == "separate":
            for member in rollouts:
                member.spare = partial(rollout.spare, member)
        yield TrainSlab(trainers, supervisor), rollout, supervisor


def _member(config: RunConfig, placement: Placement, index: int, num_train: int, logs: Path) -> Member:
    trains = index < num_train
    slab = "worker" if config.layout == "colocate" else "train" if trains else "rollout"
    rank = index if trains else index - num_train
    name = f"worker {rank}" if slab == "worker" else f"{slab} worker {rank}"
    log = logs / f"{slab}-{rank}.log"

    def start() -> Any:
        generates = config.layout == "colocate" or not trains
        actor = as_actor(Worker).options(**placement.options(index))
        place = placement.place(index)
        return actor.remote(config, rank, log.stem, str(log), place, trains=trains, generates=generates)

    return Member(name, log, start)


def _revive(ask: Callable[..., Any], *, rollout: RolloutSlab) -> None:
    """A new rollout worker gets its model and the weights that the others hold, and proves that it has them."""
    ask("build", None, 0)
    rollout.reload(ask)
