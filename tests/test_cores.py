# SPDX-License-Identifier: Apache-2.0
"""Which cores a process may use."""

from __future__ import annotations

import os

import pytest

from unirl.cores import usable_cores


def test_they_are_those_that_the_process_is_bound_to() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {max(before)})
        assert usable_cores() == [max(before)]
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == sorted(before)


def test_a_system_without_affinity_has_all_of_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == list(range(os.cpu_count() or 1))
