# SPDX-License-Identifier: Apache-2.0
"""Which prompts to generate next: new requests in the data's order, and before them whatever was put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unirl.rollout.dispatch import RolloutRequest


@dataclass(frozen=True)
class Piece:
    """Some of the prompts of request number `source_index`, named by group id."""

    source_index: int
    group_ids: tuple[str, ...]


class PromptQueue:
    """Hands out prompts, each once, and once more for every time it is put back.

    `source(index)` gives request number `index`, the same one whenever it is asked again: what is put back is
    remembered by id and asked for anew, so the queue holds no request and saves as plain lists.
    """

    def __init__(self, source: Callable[[int], RolloutRequest]) -> None:
        self._source = source
        self._next_index = 0
        self._waiting: deque[Piece] = deque()

    def take(self, max_groups: int, batch_groups: int) -> tuple[tuple[Piece, ...], RolloutRequest]:
        """The next prompts, at most `max_groups` of them, and the request that asks for them.

        Waiting prompts go first, together, at most `batch_groups` of them. Otherwise the next request is
        taken: whole if it fits; else its first part, and the rest waits. Raises what the source raises, and
        then takes nothing.
        """
        if self._waiting:
            first, rest = _cut(self._waiting, min(max_groups, batch_groups))
            request = self.request_for(first)
            self._waiting = deque(rest)
            return first, request
        request = self._source(self._next_index)
        group_ids = tuple(part.group_id for part in request.split())
        if not group_ids:
            raise ValueError(f"request {self._next_index} holds no prompts; a source must give at least one")
        first, rest = _cut([Piece(self._next_index, group_ids)], max_groups)
        if rest:
            request = self.request_for(first)
        self._next_index += 1
        self._waiting.extend(rest)
        return first, request

    def put_back(self, pieces: Iterable[Piece]) -> None:
        """Lets prompts be taken again, before any other: what was launched once comes before what was not."""
        self._waiting.extendleft(reversed(tuple(pieces)))

    def request_for(self, pieces: Sequence[Piece]) -> RolloutRequest:
        """One request for the prompts of the pieces, in order, under their own ids."""
        indices = dict.fromkeys(piece.source_index for piece in pieces)
        by_id = {index: {part.group_id: part for part in self._source(index).split()} for index in indices}
        wanted = [(piece.source_index, group_id) for piece in pieces for group_id in piece.group_ids]
        missing = [group_id for index, group_id in wanted if group_id not in by_id[index]]
        assert not missing, f"the source no longer gives {missing}: it must repeat itself"
        parts = [by_id[index][group_id] for index, group_id in wanted]
        return parts[0].concat(parts)

    def state_dict(self) -> dict[str, Any]:
        return {"next_index": self._next_index, "waiting": [to_plain(piece) for piece in self._waiting]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next_index = state["next_index"]
        self._waiting = deque(from_plain(piece) for piece in state["waiting"])


def to_plain(piece: Piece) -> list[Any]:
    return [piece.source_index, list(piece.group_ids)]


def from_plain(plain: Sequence[Any]) -> Piece:
    return Piece(plain[0], tuple(plain[1]))


def _cut(pieces: Iterable[Piece], num_groups: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The first `num_groups` prompts of the pieces, and the others."""
    first: list[Piece] = []
    rest: list[Piece] = []
    for piece in pieces:
        head, tail = piece.group_ids[:num_groups], piece.group_ids[num_groups:]
        num_groups -= len(head)
        if head:
            first.append(Piece(piece.source_index, head))
        if tail:
            rest.append(Piece(piece.source_index, tail))
    return tuple(first), tuple(rest)
