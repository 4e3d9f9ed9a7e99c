# SPDX-License-Identifier: Apache-2.0
"""The estimate's arithmetic, with the machine's speed and cores given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe

from unirl.trainer import estimate
from unirl.trainer.estimate import estimate_seconds
from unirl.trainer.requests import Requests


@pytest.fixture
def seconds(random_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Estimates on `cores` cores of 1 GFLOP/s each, without a GPU."""
    monkeypatch.setattr(estimate, "_flops_per_s", lambda *_: 1e9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def estimated(cores: int, *, asynchronous: bool = False, **changes: Any) -> float:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        config = recipe(random_base, tmp_path / "run", **changes)
        return estimate_seconds(config, Requests(config), asynchronous=asynchronous)

    return estimated


def test_more_ranks_than_cores_are_no_faster(seconds: Any) -> None:
    two = seconds(2, num_devices=2)
    assert two == pytest.approx(seconds(1) / 2)
    assert seconds(2, num_devices=8) == pytest.approx(two)
    assert seconds(8, num_devices=8) == pytest.approx(two / 4)
    assert seconds(4, num_devices=2, threads_per_worker=4) == pytest.approx(two * 2)


def test_ranks_that_work_beside_each_other_share_the_cores(seconds: Any) -> None:
    apart = {"num_devices": 2, "layout": "separate", "asynchronous": True}
    assert seconds(1, **apart) == pytest.approx(2 * seconds(2, **apart))
    assert seconds(1, **apart | {"ray_address": "elsewhere:6379"}) == pytest.approx(seconds(2, **apart))
    in_turn = {"num_devices": 2, "layout": "separate"}
    assert seconds(1, **in_turn) == pytest.approx(seconds(2, **in_turn))


def test_measuring_leaves_the_number_of_threads_as_it_was() -> None:
    before = torch.get_num_threads()
    assert estimate._flops_per_s(64, 128, before + 1) > 0
    assert torch.get_num_threads() == before
