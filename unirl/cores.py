# SPDX-License-Identifier: Apache-2.0
"""The cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Numbers of the cores, in order; where a system does not say which ones (macOS), as many as it has."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
