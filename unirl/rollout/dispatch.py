# SPDX-License-Identifier: Apache-2.0
"""How a generation reaches the rollout slab: the protocols the scheduler knows, and the dispatcher for Ray
actors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

from unirl.rollout.buffer import RolloutGroup


class RolloutRequest(Protocol):
    """Prompts to generate a group of siblings for, each. A prompt's group id is unique in the run."""

    @property
    def group_id(self) -> str:
        """Id of the only group; read on the results of `split` alone."""

    def split(self) -> Sequence[Any]:
        """One request a group, in order, ids unchanged."""

    def concat(self, requests: Sequence[Any], /) -> Any:
        """Static: the requests as one, in order, ids unchanged. The inverse of `split`."""


class RayGenerationDispatcher:
    """Runs a generation on the Ray actors of the rollout slab, each with a contiguous share of its groups.

    `workers` are actor handles with a `generate(request)` method of two results: light rows, and trajectories,
    which the driver never fetches. A generation with fewer groups than workers leaves the last ones idle.
    `collect_fn(pairs)` turns the workers' (light, trajectories) references, in worker order, into groups; it
    runs on the driver, once a reap, and does whatever moves data. `ray` is the module.

    A worker that died makes `collect` raise `ray.exceptions.RayActorError`.
    """

    def __init__(
        self, workers: Sequence[Any], *, ray: Any, collect_fn: Callable[[list[Any]], Sequence[RolloutGroup]]
    ) -> None:
        if not workers:
            raise ValueError(
                "a rollout slab needs at least one worker, and none was given; lower train_fraction"
            )
        self._workers = list(workers)
        self._ray = ray
        self._collect_fn = collect_fn

    def launch(self, request: RolloutRequest) -> list[Any]:
        parts = request.split()
        shares = contiguous_shares(len(parts), len(self._workers))
        return [
            tuple(worker.generate.options(num_returns=2).remote(request.concat(parts[start:stop])))
            for worker, (start, stop) in zip(self._workers, shares, strict=True)
            if stop > start
        ]

    def is_ready(self, handle: list[Any]) -> bool:
        return self._num_ended(handle, timeout_s=0) == len(handle)

    def wait(self, handle: list[Any]) -> None:
        self._num_ended(handle, timeout_s=None)

    def collect(self, handle: list[Any]) -> Sequence[RolloutGroup]:
        return self._collect_fn(handle)

    def _num_ended(self, handle: list[Any], timeout_s: float | None) -> int:
        # fetch_local=False: asking whether a result exists must not copy it to this node.
        light = [pair[0] for pair in handle]
        ended, _ = self._ray.wait(light, num_returns=len(handle), timeout=timeout_s, fetch_local=False)
        return len(ended)


def contiguous_shares(num_items: int, num_shares: int) -> list[tuple[int, int]]:
    """[start, stop) of each share, in order; sizes differ by at most one, larger ones first."""
    size, extra = divmod(num_items, num_shares)
    bounds = [index * size + min(index, extra) for index in range(num_shares + 1)]
    return list(pairwise(bounds))
