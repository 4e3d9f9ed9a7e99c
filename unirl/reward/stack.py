# SPDX-License-Identifier: Apache-2.0
"""The micro loop of a rollout rank: generate some rows, score them, generate the next."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from unirl.progress import reached
from unirl.protocols import Engine, Scorer, UnitSource
from unirl.reward.score import score_rows
from unirl.reward.units import Batch, BatchSource, FixedBatches, PulledUnits
from unirl.schedule.plan import RolloutPlan
from unirl.schedule.policies import policy_for
from unirl.schedule.timeline import Call
from unirl.types import Part, Sample


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """What one rank did of a request.

    Attributes:
        sample: the request with only these rows, in the order in which they were done; None when there were none.
        calls: of the engine and of the scorers; times are unix seconds.
        num_stolen_units: units among them that were another rank's.
    """

    sample: Sample | None
    calls: tuple[Call, ...]
    num_stolen_units: int = 0

    @property
    def seconds(self) -> dict[str, float]:
        """`generate_s` and `score_s`; with overlap they add up to more than the time that passed."""
        totals = {"generate_s": 0.0, "score_s": 0.0}
        for call in self.calls:
            totals[f"{call.phase}_s"] += call.end - call.start
        return totals


class RewardStack:
    """Generates rows in micro-batches and scores every one.

    Args:
        engine: fills a request's frontier.
        scorers: by name; each gives a column of `component_rewards`. Without any, rows are left unscored.
        micro_batch_size: rows a call of the engine, at most.
        overlap: score one micro-batch in a thread while the engine generates the next.

    How rows are cut into calls and which rank runs them changes when a row is done, and nothing about the row, as long as
    the engine's rows do not depend on their batch.
    """

    def __init__(
        self, engine: Engine, scorers: Mapping[str, Scorer], *, micro_batch_size: int, overlap: bool = False
    ) -> None:
        self.engine = engine
        self.scorers = dict(scorers)
        self.micro_batch_size = micro_batch_size
        self.overlap = overlap

    def generate_and_score(self, request: Sample) -> Sample:
        """The whole request, its frontier generated and scored: the loop without a schedule."""
        done = self.run_alone(request).sample
        assert done is not None
        return done

    def run_alone(self, request: Sample, *, rank: int = 0) -> ScoredRows:
        """All rows of a request in order, whole groups kept together where they fit into a micro-batch."""
        ids = request.frontier.ids
        batches = [
            Batch(rows, ids[rows[0]] if len(rows) == 1 else f"{ids[rows[0]]} .. {ids[rows[-1]]}")
            for rows in micro_batches(request.frontier.group_ids, self.micro_batch_size)
        ]
        return self._run(request, FixedBatches(batches), rank)

    def run_share(
        self, request: Sample, plan: RolloutPlan, rank: int, source: UnitSource | None = None
    ) -> ScoredRows:
        """What a schedule gives to this rank, one unit after another.

        Args:
            request: all rows of the rollout, so that the rank can run any of them.
            source: the ranks' coordinator, where the plan needs one.

        Raises:
            ValueError: stealing, and an engine whose noise is not keyed by row.
        """
        policy_for(plan.schedule, engine=self.engine.name, noise_keyed_by_row=self.engine.noise_keyed_by_row)
        if source is None:
            assert not plan.needs_coordinator, f"schedule {plan.schedule} needs the ranks' coordinator"
            source = plan.coordinator()
        place = {row_id: index for index, row_id in enumerate(request.frontier.ids)}
        return self._run(request, PulledUnits(plan, rank, place, source), rank)

    def score_share(self, rows: Part, *, rank: int = 0) -> ScoredRows:
        """Scores rows that any rank generated; images stay behind."""
        begin = time.time()
        scored = self._scored(rows).replace(media=None)
        sizes = "+".join(dict.fromkeys(f"{canvas.height}x{canvas.width}" for canvas in rows.canvases()))
        label = f"{rows.ids[0]} .. {rows.ids[-1]}"
        call = Call(rank, begin, time.time(), "score", label, len(rows), sizes)
        return ScoredRows(Sample((scored,)), (call,))

    def _scored(self, rows: Part) -> Part:
        reached("score.micro")
        return rows.replace(component_rewards=score_rows(self.scorers, rows))

    def _run(self, request: Sample, source: BatchSource, rank: int) -> ScoredRows:
        frontier = request.frontier
        self.engine.check(frontier)
        canvases = [f"{canvas.height}x{canvas.width}" for canvas in frontier.canvases()]
        zero = time.time() - time.perf_counter()
        calls: list[Call] = []
        kept: list[Part | Future[Part]] = []
        num_stolen_units = 0

        def note(phase: str, batch: Batch, begin: float) -> None:
            end = time.perf_counter()
            sizes = "+".join(dict.fromkeys(canvases[row] for row in batch.rows))
            calls.append(
                Call(rank, zero + begin, zero + end, phase, batch.label, len(batch.rows), sizes, batch.stolen)
            )

        def scored(batch: Batch, part: Part) -> Part:
            begin = time.perf_counter()
            part = self._scored(part)
            note("score", batch, begin)
            return part

        with ThreadPoolExecutor(max_workers=1) as beside:
            batch = source.first()
            while batch is not None:
                begin = time.perf_counter()
                micro = request.replace_frontier(frontier.select(batch.rows))
                reached("generate.micro")
                part = self.engine.generate(micro).frontier
                note("generate", batch, begin)
                result: Part | Future[Part] = part
                if self.scorers:
                    result = beside.submit(scored, batch, part) if self.overlap else scored(batch, part)
                wanted, following = source.next(batch, time.perf_counter() - begin)
                if wanted:
                    kept.append(result)
                    num_stolen_units += batch.num_units * batch.stolen
                batch = following
        parts = [part.result() if isinstance(part, Future) else part for part in kept]
        sample = request.replace_frontier(Part.concat(parts)) if parts else None
        return ScoredRows(sample, tuple(calls), num_stolen_units)


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
