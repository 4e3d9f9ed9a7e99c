# SPDX-License-Identifier: Apache-2.0
"""How well the rollout ranks were used: metrics of a step's generations, and their trace file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from unirl.distributed.slabs import Group
from unirl.schedule.timeline import CallTimeline, chrome_trace


def schedule_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the generations that the groups came from, each by the share of it that is used here."""
    known = [(group.timeline, 1.0 / group.num_groups) for group in groups if group.timeline is not None]
    if not known:
        return {}
    metrics: dict[str, float] = {"perf/idle_s": 0.0, "schedule/calls": 0.0, "schedule/stolen_units": 0.0}
    for timeline, share in known:
        idle = timeline.idle
        metrics["perf/idle_s"] += share * sum(idle) / len(idle)
        metrics["schedule/calls"] += share * sum(call.phase == "generate" for call in timeline.calls)
        metrics["schedule/stolen_units"] += share * timeline.num_stolen_units
        for rank, seconds in enumerate(idle):
            key = f"perf/idle_s/rank_{rank}"
            metrics[key] = metrics.get(key, 0.0) + share * seconds
    total = sum(share for _, share in known)
    metrics["perf/tail_ratio"] = sum(timeline.tail_ratio * share for timeline, share in known) / total
    return metrics


def write_timelines(folder: Path, rollout_id: int, groups: Sequence[Group]) -> Path | None:
    """`rollout_<id>.json`, for chrome://tracing or Perfetto: the generations that the step's groups came from."""
    members: dict[int, tuple[CallTimeline, list[str]]] = {}
    for group in groups:
        if group.timeline is not None:
            members.setdefault(id(group.timeline), (group.timeline, []))[1].append(group.group_id)
    if not members:
        return None
    named = [(f"{ids[0]} .. {ids[-1]}", timeline) for timeline, ids in members.values()]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rollout_{rollout_id:06d}.json"
    path.write_text(json.dumps(chrome_trace(named), separators=(",", ":")))
    return path
