# SPDX-License-Identifier: Apache-2.0
"""One Ray cluster a test session, and weights that every test may share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

NUM_LOGICAL_CPUS = 8


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Parallel runs: the tests of a file stay together, and all that need the cluster go to one process."""
    for item in items:
        uses_cluster = "ray_cluster" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("cluster" if uses_cluster else item.path.name))


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local cluster with more logical cores than the machine may have: ranks take turns."""
    import ray

    ray.init(
        address="local",
        num_cpus=NUM_LOGICAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def random_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a digits model of random weights, output layer included."""
    from unirl.models.bagel import Bagel, preset, save_model

    model = Bagel(preset("bagel-digits"))
    model.initialize(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "pos_embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.12)
    folder = tmp_path_factory.mktemp("random_base")
    save_model(model, folder)
    return folder
