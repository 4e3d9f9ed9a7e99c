# SPDX-License-Identifier: Apache-2.0
"""Scorers that benchmarks name by `_scorers:Class`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any


class Waiting:
    """Answers after a while and uses no core meanwhile, as a judge on another machine does. Every score is 0.

    Args:
        seconds: a call.
    """

    name = "waiting"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def score(
        self, images: Sequence[Any], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        time.sleep(self.seconds)
        return [0.0] * len(images)
