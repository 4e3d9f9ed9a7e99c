# SPDX-License-Identifier: Apache-2.0
"""The driver's buffer of finished groups, each with the weight version it was generated under."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

BufferOrder = Literal["oldest", "freshest"]


class RolloutGroup(Protocol):
    """A finished group of siblings. Nothing else of it is read here."""

    @property
    def group_id(self) -> str:
        """Id of the prompt, unique in the run and kept when the prompt is generated again."""

    @property
    def push_version(self) -> int:
        """Number of weight pushes the generating engine had received, recorded by that engine."""


@dataclass(frozen=True)
class BufferedGroup:
    """A finished group and where it came from.

    `generation` counts launches, so it orders groups by age; `position` is the group's place in its
    generation; `source_index` says which request to ask for when the group has to be generated again.
    """

    group: RolloutGroup
    version: int
    generation: int
    position: int
    source_index: int

    @property
    def group_id(self) -> str:
        return self.group.group_id


class VersionedGroupBuffer:
    """Finished groups waiting to be trained, taken oldest or freshest first.

    `oldest` takes in launch order. `freshest` takes the latest generation first and keeps the groups of one
    generation in their order. In both, the result is a function of what is buffered, not of when it arrived.
    """

    def __init__(self, order: BufferOrder = "oldest") -> None:
        if order not in ("oldest", "freshest"):
            raise ValueError(f"buffer_order is {order!r}; allowed are 'oldest' and 'freshest'")
        self.order = order
        self._items: list[BufferedGroup] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[BufferedGroup, ...]:
        """What is buffered, in launch order."""
        return tuple(sorted(self._items, key=lambda item: (item.generation, item.position)))

    def put_all(self, items: Iterable[BufferedGroup]) -> None:
        self._items.extend(items)

    def take(self, num_groups: int) -> list[BufferedGroup] | None:
        """Removes and returns `num_groups` groups, or returns None and removes nothing when there are
        fewer."""
        if len(self._items) < num_groups:
            return None
        direction = 1 if self.order == "oldest" else -1
        self._items.sort(key=lambda item: (direction * item.generation, item.position))
        taken, self._items = self._items[:num_groups], self._items[num_groups:]
        return taken

    def evict_older_than(self, oldest_version: int) -> list[BufferedGroup]:
        """Removes and returns, in launch order, the groups generated before `oldest_version`."""
        stale = [item for item in self.items if item.version < oldest_version]
        self._items = [item for item in self._items if item.version >= oldest_version]
        return stale
