# SPDX-License-Identifier: Apache-2.0
"""The training group: sums over ranks, through gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

NO_TIMEOUT_S = 30 * 86400.0
MARGIN = 2.0
"""A collective gives up later than the driver does, which knows the rank that did not come."""
_RENDEZVOUS = datetime.timedelta(seconds=600)


class LocalCollective:
    """A group of one."""

    rank = 0
    world_size = 1

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class GroupCollective:
    """torch.distributed's default group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor


def open_store(host: str, world_size: int) -> tuple[Any, tuple[str, int]]:
    """A rendezvous on a free port of `host` and its address."""
    store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=_RENDEZVOUS)
    return store, (host, store.port)


def join_group(
    rank: int, world_size: int, store: Any, *, timeout_s: float = 0.0
) -> LocalCollective | GroupCollective:
    """Joins the group. `store` is what rank 0 opened, or its (host, port).

    `timeout_s`: when the driver takes a rank that does not move for hung; 0: never.
    """
    if world_size == 1:
        return LocalCollective()
    if isinstance(store, tuple):
        store = dist.TCPStore(store[0], store[1], world_size, is_master=False, timeout=_RENDEZVOUS)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s * MARGIN or NO_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return GroupCollective()
