# SPDX-License-Identifier: Apache-2.0
"""What a person watching a run sees.

One line a rollout, with a progress bar and the time left on a terminal.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any, Literal

from unirl.metrics.scalars import is_finite_number, to_scalar

PHASES = (("generate", "gen"), ("transfer", "xfer"), ("score", "score"), ("train", "train"), ("push", "push"))
_RECENT_ROLLOUTS = 8


class ConsoleSink:
    """A `MetricsSink` for the terminal.

    On a terminal (`mode` rich) a line a rollout scrolls above a progress bar with the time left; elsewhere
    (`plain`: a log file, CI) the same line is printed with the time left at its end. `auto` picks by whether
    `stream` is a terminal. Metrics without a `reward` but with `eval/...` make an evaluation line and do not
    advance the bar.

    Args:
        num_rollouts: of the whole run.
        first_step: rollouts that are done already (a resumed run).
    """

    def __init__(
        self,
        num_rollouts: int,
        *,
        first_step: int = 0,
        mode: Literal["auto", "rich", "plain"] = "auto",
        stream: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_rollouts = num_rollouts
        self._stream = stream if stream is not None else sys.stdout
        self._clock = clock
        self._last, self._ticking = clock(), False
        self._seconds: deque[float] = deque(maxlen=_RECENT_ROLLOUTS)
        self._progress: Any = None
        self._task: Any = None
        if mode == "rich" or (mode == "auto" and self._stream.isatty()):
            self._start_bar(first_step)

    def message(self, text: str) -> None:
        """Prints a line of text (a plan, a warning) without tearing the progress bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints the rollout's line; `step` is the rollout id, counted from 0."""
        evaluation = format_evaluation(step, metrics)
        if evaluation:  # it came before the rollout's training
            self.message(evaluation)
        if "reward" in metrics:
            done = step + 1
            self._tick()
            line = format_rollout(step, self.num_rollouts, metrics)
            left = self.seconds_left(done)
            if self._progress is not None:
                self.message(line)
                self._progress.update(self._task, completed=done, left=_clock_text(left))
            else:
                self.message(f"{line} | {_clock_text(left)} left")

    def seconds_left(self, done: int) -> float:
        """The remaining rollouts times the median of the last few; NaN at first.

        The first rollout of a process tells nothing: it holds the start-up and the first evaluation.
        """
        if not self._seconds:
            return math.nan
        return max(self.num_rollouts - done, 0) * statistics.median(self._seconds)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _tick(self) -> None:
        now = self._clock()
        if self._ticking:
            self._seconds.append(now - self._last)
        self._last, self._ticking = now, True

    def _start_bar(self, first_step: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("rollouts"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]} left"),
            console=Console(file=self._stream, force_terminal=True),
            transient=False,
        )
        self._task = self._progress.add_task(
            "rollouts", total=self.num_rollouts, completed=first_step, left="?"
        )
        self._progress.start()


def format_rollout(step: int, num_rollouts: int, metrics: Mapping[str, Any]) -> str:
    """The rollout's numbers on one line; what was not measured is left out.

    |ratio-1| is in scientific form (3.1e-09 and 0 are different news, "1.0000" is none), seconds are those of
    each phase.
    """
    values = {name: to_scalar(name, value) for name, value in metrics.items()}
    width = len(str(num_rollouts))
    parts = [f"{step + 1:{width}d}/{num_rollouts}"]
    if "reward" in values:
        parts.append(f"reward {_number(values['reward'], '.3f')}")
    distance = ratio_distance(values)
    if distance is not None:
        parts.append(f"|ratio-1| {distance:.1e}")
    if "clip" in values:
        worst = f" (max {_number(values['clip_max'], '.3f')})" if _differs(values, "clip", "clip_max") else ""
        parts.append(f"clip {_number(values['clip'], '.3f')}{worst}")
    if "gn" in values:
        parts.append(f"gn {_number(values['gn'], '.1e')}")
    phases = [
        f"{short} {_number(values[f'perf/{name}_s'], '.2f')}"
        for name, short in PHASES
        if f"perf/{name}_s" in values
    ]
    if phases:
        parts.append("| " + " ".join(phases) + " s")
    lag = [
        f"{label} {_number(values[name], 'g')}"
        for name, label in (("async/staleness", "stale"), ("async/policy_lag", "lag"))
        if name in values
    ]
    if lag:
        parts.append("| " + " ".join(lag))
    for name, label in (("rows/dropped", "dropped rows"), ("train/skipped_steps", "skipped steps")):
        if is_finite_number(values.get(name)) and values[name]:
            parts.append(f"| {label} {_number(values[name], 'g')}")
    return " ".join(parts)


def format_evaluation(step: int, metrics: Mapping[str, Any]) -> str:
    """The evaluation's numbers, a line a set, or nothing when there are none."""
    # A scorer that is the whole reward would be shown twice.
    names = [
        n
        for n in metrics
        if n.startswith("eval/") and n != "eval/version" and not _repeats_reward(metrics, n)
    ]
    if not names:
        return ""
    names.sort(key=lambda name: (name.count("/"), not name.endswith("/reward"), name))
    sets: dict[str, list[str]] = {}
    for name in names:
        *of_set, last = name.split("/")[1:]
        sets.setdefault("/".join(of_set), []).append(
            f"{last} {_number(to_scalar(name, metrics[name]), '.3f')}"
        )
    lines = [f"{of_set}: {' '.join(numbers)}".removeprefix(": ") for of_set, numbers in sets.items()]
    version = f" (policy version {metrics['eval/version']})" if "eval/version" in metrics else ""
    return f"eval at {step}{version}: " + "\n     ".join(lines)


def ratio_distance(values: Mapping[str, Any]) -> float | None:
    """|ratio - 1| of a rollout: the largest one of rows replayed under their generating weights; else that of the mean ratio.

    The first measures numerics alone. The mean ratio of several updates, or of rows from older weights, is also away from 1 because
    the policy has moved.
    """
    for name, target in (("parity/abs_ratio_minus_one_max", 0.0), ("ratio", 1.0)):
        value = values.get(name)
        if isinstance(value, (int, float)):
            return abs(value - target)
    return None


def _repeats_reward(metrics: Mapping[str, Any], name: str) -> bool:
    reward = name.rsplit("/", 1)[0] + "/reward"
    return name != reward and reward in metrics and metrics[name] == metrics[reward]


def _differs(values: Mapping[str, Any], name: str, other: str) -> bool:
    return other in values and values[other] != values[name]


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else str(value)


def _clock_text(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
