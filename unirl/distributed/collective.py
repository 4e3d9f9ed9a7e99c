# SPDX-License-Identifier: Apache-2.0
"""The training group: sums over ranks, through gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 600.0


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
    store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=_timeout())
    return store, (host, store.port)


def join_group(rank: int, world_size: int, store: Any) -> LocalCollective | GroupCollective:
    """Joins the group. `store` is what rank 0 opened, or its (host, port)."""
    if world_size == 1:
        return LocalCollective()
    if isinstance(store, tuple):
        store = dist.TCPStore(store[0], store[1], world_size, is_master=False, timeout=_timeout())
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_timeout())
    return GroupCollective()


def _timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=TIMEOUT_S)
