# SPDX-License-Identifier: Apache-2.0
"""Where workers go, and refusals that name what was asked and what there is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from unirl.config import RunConfig, parse
from unirl.distributed.cluster import Devices, find_devices
from unirl.distributed.failures import ClusterRefusal
from unirl.distributed.placement import node_shares, placed


def config(**keys: Any) -> RunConfig:
    return parse(RunConfig, keys)


def node(name: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeName": name, "NodeManagerAddress": name, "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("rooms", "num_devices", "num_nodes", "shares"),
    [
        ((4, 4), 8, 2, [4, 4]),
        ((4, 4), 3, 2, [2, 1]),
        ((3, 5), 8, 2, [5, 3]),
        ((3, 5), 4, 2, [2, 2]),
        ((8, 1, 1), 6, 3, [4, 1, 1]),
        ((8, 2, 5), 7, 1, [7]),
    ],
)
def test_workers_are_spread_evenly_over_the_asked_nodes_as_far_as_those_hold_them(
    rooms: tuple[int, ...], num_devices: int, num_nodes: int, shares: list[int]
) -> None:
    devices = Devices("GPU", tuple((f"n{i}", room) for i, room in enumerate(rooms)))
    assert node_shares(config(num_devices=num_devices, num_nodes=num_nodes), devices) == shares


def test_nodes_that_hold_enough_only_when_more_of_them_are_taken_are_refused() -> None:
    devices = Devices("GPU", (("n0", 4), ("n1", 4)))
    with pytest.raises(
        ClusterRefusal,
        match=r"6 on 1 node\(s\).*available: 8 GPUs on 2 node\(s\) \(n0: 4, n1: 4\).*num_nodes",
    ):
        node_shares(config(num_devices=6, num_nodes=1), devices)


def test_gpus_count_where_there_are_any_and_else_cores_in_workers() -> None:
    nodes = [node("a", CPU=16, GPU=2), node("b", CPU=16), node("gone", alive=False, CPU=16, GPU=8)]
    assert find_devices(config(num_devices=2), nodes) == Devices("GPU", (("a", 2), ("b", 0)))
    devices = find_devices(config(num_devices=3, threads_per_worker=4), [node("a", CPU=10), node("b", CPU=6)])
    assert devices == Devices("CPU", (("a", 2), ("b", 1)))


def test_more_than_the_cluster_has_is_refused_with_asked_available_and_per_node() -> None:
    with pytest.raises(
        ClusterRefusal, match=r"asks for 9 on 1 node.*available: 3 GPUs on 2 node\(s\) \(a: 2, b: 1\)"
    ):
        find_devices(config(num_devices=9), [node("a", GPU=2), node("b", GPU=1)])


def test_devices_that_another_job_holds_are_refused_within_seconds(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = int(ray.cluster_resources()["CPU"])
    with placed(config(num_devices=total - 1), find_devices(config())), monkeypatch.context() as patched:
        patched.setattr("unirl.distributed.placement.RESERVE_TIMEOUT_S", 1.0)
        begin = time.monotonic()
        with (
            pytest.raises(ClusterRefusal, match=rf"asks for 2 .*available: {total} .*of these 1 are free"),
            placed(config(num_devices=2), find_devices(config())),
        ):
            pass
        assert time.monotonic() - begin < 5
    with placed(config(num_devices=total), find_devices(config())):
        pass  # all were given back


TWO_NODES = """
    import sys
    from pathlib import Path
    import ray
    from ray.cluster_utils import Cluster
    sys.path[:0] = {paths!r}
    from recipes import recipe, metrics
    from unirl.distributed.launch import slabs
    from unirl.distributed.cluster import cluster, find_devices
    from unirl.trainer.async_diffusion import AsyncDiffusionTrainer

    base, folder = Path({base!r}), Path({folder!r})
    head_and_other = Cluster(initialize_head=True, head_node_args={{"num_cpus": 2}})
    head_and_other.add_node(num_cpus=3)
    head_and_other.wait_for_nodes()
    changes = dict(
        layout="separate", num_devices=4, num_nodes=2, train_fraction=0.5, num_rollouts=2, save_interval=1,
        ray_address=head_and_other.address, batch_size=3, stack__num_updates_per_batch=1, stack__micro_batch_size=2,
    )
    config = recipe(base, folder / "look", **changes)
    with cluster(config), slabs(config, find_devices(config), folder / "logs") as (train, rollout, supervisor):
        actors = [a for a in ray._private.state.actors().values() if a["State"] == "ALIVE"]
        print("actors by node", sorted(sum(a["Address"]["NodeID"] == n["NodeID"] for a in actors) for n in ray.nodes()))
    run = AsyncDiffusionTrainer(recipe(base, folder / "run", **changes)).run()
    print("steps", [m["step"] for m in metrics(run)])
    try:
        AsyncDiffusionTrainer(recipe(base, folder / "more", **{{**changes, "num_nodes": 3}})).run()
    except ValueError as error:
        print("refused", error)
    head_and_other.shutdown()
"""


@pytest.mark.slow
def test_slabs_on_two_nodes_of_a_cluster_that_is_joined_by_its_address(
    random_base: Path, tmp_path: Path
) -> None:
    """A head with 2 cores and a node with 3: two training ranks on one node, two rollout ranks on the other."""
    tests = Path(__file__).resolve().parent.parent
    program = textwrap.dedent(
        TWO_NODES.format(paths=[str(tests / "trainer")], base=str(random_base), folder=str(tmp_path))
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "actors by node [2, 2]" in done.stdout
    assert "steps [0, 1, 2]" in done.stdout
    assert (
        "refused num_devices asks for 4 on 3 node(s); available: 5 workers of 1 core(s) on 2 node(s)"
        in done.stdout
    )
