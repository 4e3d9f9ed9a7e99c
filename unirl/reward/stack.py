# SPDX-License-Identifier: Apache-2.0
"""The micro loop of a rollout rank: generate some rows, score them, generate the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from unirl.protocols import Engine, Scorer
from unirl.reward.score import score_rows
from unirl.types import Part, Sample


class RewardStack:
    """Generates a request in micro-batches and scores every one.

    Args:
        engine: fills a request's frontier.
        scorers: by name; each gives a column of `component_rewards`.
        micro_batch_size: rows a call of the engine; whole groups are kept together where they fit.
        overlap: score one micro-batch in a thread while the engine generates the next.
    """

    def __init__(
        self, engine: Engine, scorers: Mapping[str, Scorer], *, micro_batch_size: int, overlap: bool = False
    ) -> None:
        self.engine = engine
        self.scorers = dict(scorers)
        self.micro_batch_size = micro_batch_size
        self.overlap = overlap

    def generate_and_score(self, request: Sample) -> tuple[Sample, dict[str, float]]:
        """The request with its frontier generated and scored, and seconds spent: `generate_s`, `score_s`."""
        frontier = request.frontier
        self.engine.check(frontier)
        seconds = {"generate_s": 0.0, "score_s": 0.0}
        scored: list[Part | Future[Part]] = []
        with ThreadPoolExecutor(max_workers=1) as pool:
            for rows in micro_batches(frontier.group_ids, self.micro_batch_size):
                micro = request.replace_frontier(frontier.select(rows))
                part = _timed(seconds, "generate_s", lambda micro=micro: self.engine.generate(micro).frontier)
                work = lambda part=part: _timed(seconds, "score_s", lambda: self._score(part))  # noqa: E731
                scored.append(pool.submit(work) if self.overlap else work())
        parts = [p.result() if isinstance(p, Future) else p for p in scored]
        return request.replace_frontier(Part.concat(parts)), seconds

    def _score(self, part: Part) -> Part:
        return part.replace(component_rewards=score_rows(self.scorers, part))


def micro_batches(group_ids: Sequence[str], size: int) -> list[list[int]]:
    """Row indices of each micro-batch: contiguous, at most `size` rows, broken between groups where a group fits."""
    batches: list[list[int]] = [[]]
    start = 0
    while start < len(group_ids):
        end = start
        while end < len(group_ids) and group_ids[end] == group_ids[start]:
            end += 1
        for first in range(start, end, size):
            chunk = list(range(first, min(first + size, end)))
            if len(batches[-1]) + len(chunk) > size:
                batches.append([])
            batches[-1].extend(chunk)
        start = end
    return [b for b in batches if b]


def _timed(seconds: dict[str, float], key: str, work: Callable[[], Part]) -> Part:
    begin = time.perf_counter()
    result = work()
    seconds[key] += time.perf_counter() - begin
    return result
