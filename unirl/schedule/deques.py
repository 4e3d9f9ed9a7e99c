# SPDX-License-Identifier: Apache-2.0
"""One deque of unstarted units a rank, dearest at the front, with the cost that is queued in each."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

from unirl.schedule.units import Unit


class CostDeques:
    """The unstarted units of every rank.

    A rank's *load* is its queued cost times its factor, the rank's measured time a unit of cost. Finding the
    most loaded rank takes amortised O(log ranks): the heap holds upper bounds that are corrected when they
    reach the top.
    """

    def __init__(self, placement: Sequence[Iterable[Unit]]) -> None:
        self._queues = [deque(dearest_first(units)) for units in placement]
        self._queued = [sum(unit.cost for unit in queue) for queue in self._queues]
        self._factors = [1.0] * len(self._queues)
        self.total_queued = sum(self._queued)
        self._heap = [(-cost, rank) for rank, cost in enumerate(self._queued)]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._queues)

    def queue(self, rank: int) -> deque[Unit]:
        """The rank's unstarted units. Read it; take from it through `pop_front` and `pop_back`."""
        return self._queues[rank]

    def queued_cost(self, rank: int) -> float:
        return self._queued[rank]

    def pop_front(self, rank: int) -> Unit:
        """The dearest unit."""
        queue = self._queues[rank]
        unit = queue.popleft()
        self._remove(rank, unit.cost if queue else self._queued[rank])
        return unit

    def pop_back(self, rank: int) -> Unit:
        """The cheapest unit."""
        queue = self._queues[rank]
        unit = queue.pop()
        self._remove(rank, unit.cost if queue else self._queued[rank])
        return unit

    def put(self, rank: int, units: Iterable[Unit]) -> None:
        """Adds units, keeping the order."""
        added = list(units)
        self._queues[rank] = deque(dearest_first([*self._queues[rank], *added]))
        cost = sum(unit.cost for unit in added)
        self._queued[rank] += cost
        self.total_queued += cost
        heapq.heappush(self._heap, (-self._load(rank), rank))

    def clear(self, rank: int) -> list[Unit]:
        """Removes and returns all of a rank's units."""
        units = list(self._queues[rank])
        for _ in units:
            self.pop_front(rank)
        return units

    def set_factor(self, rank: int, factor: float) -> None:
        """Sets the rank's time a unit of cost, in any unit that is the same for all ranks."""
        self._factors[rank] = factor
        heapq.heappush(self._heap, (-self._load(rank), rank))

    def most_loaded(self) -> int | None:
        """The rank with the largest load, the lowest such rank on a tie; None when nothing is queued."""
        heap = self._heap
        while heap:
            load, rank = heap[0]
            if not self._queues[rank]:
                heapq.heappop(heap)
            elif -load != (current := self._load(rank)):
                heapq.heapreplace(heap, (-current, rank))
            else:
                return rank
        return None

    def _load(self, rank: int) -> float:
        return self._queued[rank] * self._factors[rank]

    def _remove(self, rank: int, cost: float) -> None:
        # The last unit takes all that is booked, so that an empty queue holds exactly nothing in spite of
        # rounding.
        self.total_queued -= cost
        self._queued[rank] -= cost


def dearest_first(units: Iterable[Unit]) -> list[Unit]:
    """By cost, largest first; units of equal cost in table order, so a group's units stay together."""
    return sorted(units, key=lambda unit: (-unit.cost, unit.unit_id))
