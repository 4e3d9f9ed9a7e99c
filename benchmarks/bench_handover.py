# SPDX-License-Identifier: Apache-2.0
"""Seconds until a finished generation's trajectories are in the training worker's hands, while the next generation runs.

Real workers, transports, dispatcher and scheduler; the generation is a sleep of known length that leaves trajectories of a known
size, and training half as long as that: it always waits for a generation to end. `colocate_store` sends the trajectories by a call
on the rollout actor, `object_store` publishes them with the generation's own result. Launch-first keeps two generations in flight,
as a caller that wants overlap has to; reap-first keeps one. With `colocate_store` and launch-first the sending call waits behind
the generation that was launched before it: that is the effect to see.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from _runs import record, table

from unirl.config import RunConfig, parse
from unirl.distributed.member import Member
from unirl.distributed.payload import unpack_segment
from unirl.distributed.process import WatchedProcess, as_actor
from unirl.distributed.slabs import RolloutSlab
from unirl.distributed.supervisor import Supervisor
from unirl.distributed.workers import Worker
from unirl.reward.stack import ScoredRows
from unirl.rollout.async_runtime import AsyncRolloutScheduler
from unirl.schedule.timeline import Call
from unirl.trainer.requests import Requests
from unirl.types import LatentSegment, Sample

ROWS = 8
MIB = 1 << 20


class SleepingSide:
    """A rollout side whose generation takes `seconds` and leaves `num_bytes` of trajectories."""

    def __init__(self, seconds: float, num_bytes: int) -> None:
        self._seconds = seconds
        tokens = num_bytes // (4 * ROWS * 2 * 64)
        self._segment = LatentSegment(
            latents=torch.ones(ROWS, 2, tokens, 64),
            frame_steps=torch.tensor([[0, 1]] * ROWS),
            token_counts=torch.full((ROWS,), tokens),
            sde_steps=torch.zeros(ROWS, 1, dtype=torch.int64),
            log_probs=torch.zeros(ROWS, 1),
            sigmas=torch.zeros(ROWS, 3, dtype=torch.float64),
        )

    def generate(self, request: Sample, rank: int, share: Any) -> tuple[ScoredRows, LatentSegment]:
        begin = time.time()
        time.sleep(self._seconds)
        rows = request.frontier
        version = torch.zeros(len(rows), dtype=torch.int64)
        done = request.replace_frontier(rows.replace(push_version=version, policy_step=version))
        call = Call(rank, begin, time.time(), "generate", "all", len(rows), "any")
        return ScoredRows(done, (call,)), self._segment


class SleepingWorker(Worker):
    """A rollout worker without a model."""

    def prepare(self, seconds: float, num_bytes: int) -> None:
        self.rollout_side = SleepingSide(seconds, num_bytes)  # type: ignore[assignment]


class Receiver(WatchedProcess):
    """The training worker's end: takes the objects as its `train` does, and reads every page once."""

    def __init__(self, log: str) -> None:
        self.begin("receiver", log)

    def take(self, *payloads: Any) -> float:
        return sum(float(unpack_segment(p).latents.flatten()[::1024].sum()) for p in payloads)


def measure(
    config: RunConfig, folder: Path, num_bytes: int, seconds: float, *, launch_first: bool, repeats: int
) -> list[float]:
    """Seconds from a generation's end until its trajectories were received, without the first one, which starts cold."""
    supervisor = Supervisor()
    worker = supervisor.add(
        Member(
            "rollout worker 0",
            folder / "rollout-0.log",
            lambda: (
                as_actor(SleepingWorker)
                .options(num_cpus=0)
                .remote(
                    config, 0, "rollout-0", str(folder / "rollout-0.log"), 0, trains=False, generates=True
                )
            ),
        )
    )
    receiver = supervisor.add(
        Member(
            "receiver",
            folder / "receiver.log",
            lambda: as_actor(Receiver).options(num_cpus=0).remote(str(folder / "receiver.log")),
        )
    )
    try:
        supervisor.get(worker.prepare.remote(seconds, num_bytes))
        slab = RolloutSlab([worker], config, supervisor)
        scheduler = AsyncRolloutScheduler(
            slab.dispatcher,
            Requests(config).training,
            groups_per_step=config.batch_size,
            num_rollouts=repeats + 3,
            weight_sync_interval=repeats + 3,
            max_inflight=2 if launch_first else 1,
            reap_before_launch=not launch_first,
        )
        taken = []
        for rollout in range(repeats + 1):
            time.sleep(seconds / 2)  # training takes half as long as generating
            groups = scheduler.next_step(rollout)
            stores = list(dict.fromkeys(h for g in groups for h in g.sample.frontier.segment.objects()))
            supervisor.get(receiver.take.remote(*stores))
            taken.append(time.time() - max(call.end for call in groups[0].timeline.calls))
            del groups, stores
        return taken[1:]
    finally:
        supervisor.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=6.0, help="of a generation")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(__import__("sys").modules[__name__])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for mib in arguments.mib:
            for transport in ("colocate_store", "object_store"):
                for order in ("launch first", "reap first"):
                    config = parse(
                        RunConfig,
                        {
                            "batch_size": 2,
                            "samples_per_prompt": ROWS // 2,
                            "layout": "separate",
                            "num_devices": 2,
                            "transport_kind": transport,
                            "data": {"train": {"name": "digits"}},
                            "reward": {"scorers": [{"name": "jpeg_compressibility"}]},
                        },
                    )
                    seconds = measure(
                        config,
                        Path(folder),
                        mib * MIB,
                        arguments.seconds,
                        launch_first=order == "launch first",
                        repeats=arguments.repeats,
                    )
                    rows.append(
                        {
                            "mib": mib,
                            "transport": transport,
                            "order": order,
                            "handover_s": round(statistics.median(seconds), 3),
                            "handover_s_max": round(max(seconds), 3),
                            "generation_s": arguments.seconds,
                            "repeats": arguments.repeats,
                        }
                    )
                    print(rows[-1], flush=True)
    ray.shutdown()
    header = ["MiB", "transport", "order", "hand-over s", "worst s"]
    print(
        table(
            header,
            [
                [str(r[k]) for k in ("mib", "transport", "order", "handover_s", "handover_s_max")]
                for r in rows
            ],
        )
    )
    print(f"a generation takes {arguments.seconds:g} s; written to {record('handover', rows)}")


if __name__ == "__main__":
    main()
