# SPDX-License-Identifier: Apache-2.0
"""`unirl parity RUN`: replays a stored rollout under the weights that generated it and says how well that agrees."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from unirl.config import RunConfig
    from unirl.parity import Drift
    from unirl.protocols import Stage
    from unirl.train.stored_rollout import StoredRollout
    from unirl.types import LayoutRecord


def add_command(commands: argparse._SubParsersAction) -> None:  # type: ignore[type-arg]
    """Registers `parity` with the command line."""
    parity = commands.add_parser(
        "parity", help="replay a stored rollout and compare it with what the rollout worker recorded"
    )
    parity.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parity.add_argument(
        "--rollout",
        type=int,
        help="which stored rollout (default: the newest; else the newest checkpoint's buffer)",
    )
    parity.add_argument(
        "--checkpoint", type=Path, help="the groups waiting in this checkpoint's buffer instead"
    )
    parity.add_argument(
        "--micro-batch-size", type=int, help="rows a replay (default: the recipe's stack.micro_batch_size)"
    )
    parity.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="replay in another precision (default: the recipe's)"
    )
    parity.add_argument("--threads", type=int, help="CPU threads (default: the recipe's threads_per_worker)")
    parity.add_argument("--rows", type=int, default=10, help="rows shown, the worst first (default 10)")
    parity.set_defaults(command=_parity)


def _parity(options: argparse.Namespace) -> int:
    report = check_run(
        options.run,
        rollout=options.rollout,
        checkpoint=options.checkpoint,
        micro_batch_size=options.micro_batch_size,
        dtype=options.dtype,
        threads=options.threads,
        max_rows=options.rows,
    )
    print(report.text)
    return 0 if report.agrees else 1


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """What a replay of stored rows showed: the text for a reader, and whether layouts and log-probs agree."""

    text: str
    agrees: bool
    drift: Drift


def check_run(
    run_dir: str | os.PathLike[str],
    *,
    rollout: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    micro_batch_size: int | None = None,
    dtype: str | None = None,
    threads: int | None = None,
    max_rows: int = 10,
) -> ParityReport:
    """Replays stored rows of a run.

    Args:
        rollout: number of a stored rollout; by default the newest, or else what waits in the newest checkpoint.
        checkpoint: a checkpoint's folder instead, or its name in the run.
        micro_batch_size, dtype, threads: the recipe's when None; another value shows what depends on it.
        max_rows: rows in the last table.

    Raises `ValueError` when nothing is stored, or a row's weights are not.
    """
    import torch

    from unirl.cli_model import find_checkpoint, load_recipe
    from unirl.distributed.models import build_model
    from unirl.parity import default_tolerance
    from unirl.train.stored_rollout import find_rollout, load_rollout
    from unirl.train.trainable import is_bitwise

    config = load_recipe(run_dir)
    if dtype is not None:
        parity = dataclasses.replace(config.parity, bitwise=None)
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, dtype=dtype), parity=parity
        )
    torch.set_num_threads(threads or config.threads_per_worker)
    stored = load_rollout(
        find_rollout(run_dir, rollout) if checkpoint is None else find_checkpoint(run_dir, checkpoint)
    )
    model, stage = build_model(config)
    tolerance = config.stack.first_update_ratio_tol
    if tolerance is None:
        tolerance = 0.0 if is_bitwise(config, model) else default_tolerance(config.model.dtype)
    return _compare(
        stored, config, model, stage, micro_batch_size or config.stack.micro_batch_size, tolerance, max_rows
    )


def _compare(
    stored: StoredRollout,
    config: RunConfig,
    model: torch.nn.Module,
    stage: Stage,
    micro_batch_size: int,
    tolerance: float,
    max_rows: int,
) -> ParityReport:
    from unirl.parity import LayoutMismatch, compare, measure_drift, render_drift

    rows = stored.rows
    log_probs, fingerprints, layouts = _replay(stored, model, stage, micro_batch_size)
    canvases = [f"{canvas.height}x{canvas.width}" for canvas in rows.canvases()]
    try:
        compare(
            rows.fingerprints,
            fingerprints,
            rows.ids,
            worker_fields=None if rows.layouts is None else [layout.fields() for layout in rows.layouts],
            trainer_fields=None if layouts is None else [layout.fields() for layout in layouts],
        )
        laid_out, problem = (
            True,
            f"all {len(rows)} rows were laid out alike by the rollout worker and by this replay",
        )
    except LayoutMismatch as mismatch:
        laid_out, problem = False, str(mismatch)
    drift = measure_drift(log_probs, rows.segment.log_probs, rows.segment.sde_steps, canvases, rows.ids)
    largest = drift.abs_dlogp_max
    within = largest <= tolerance
    text = "\n\n".join(
        [
            f"{stored.path}: {len(rows)} rows of weight versions {sorted(stored.weights)}, replayed in micros of at most "
            f"{micro_batch_size} rows, {config.model.dtype}",
            problem,
            render_drift(drift, clip_range=config.algorithm.clip_range, max_rows=max_rows),
            f"largest |dlogp| {largest:.2e}, tolerance {tolerance:.2e}: "
            + ("agrees" if within else "does NOT agree"),
        ]
    )
    return ParityReport(text, laid_out and within, drift)


def _replay(
    stored: StoredRollout, model: torch.nn.Module, stage: Stage, micro_batch_size: int
) -> tuple[torch.Tensor, torch.Tensor | None, list[LayoutRecord] | None]:
    """Log-probs, digests and layouts in row order, each row under the weights that generated it."""
    import torch

    from unirl.train.trainable import swapped, trained_parameters

    rows = stored.rows
    assert rows.push_version is not None
    versions, canvases = rows.push_version.tolist(), rows.canvases()
    lost = sorted(set(versions) - set(stored.weights))
    if lost:
        raise ValueError(
            f"{stored.path} has rows of weight versions {lost} and not those weights; stored: {sorted(stored.weights)}"
        )
    parameters = trained_parameters(model)
    order: list[int] = []
    log_probs, fingerprints, layouts = [], [], []
    alike: dict[object, list[int]] = {}
    for row, key in enumerate(zip(versions, canvases, strict=True)):
        alike.setdefault(key, []).append(row)
    for members in alike.values():
        with torch.no_grad(), swapped(parameters, stored.weights[versions[members[0]]]):
            for start in range(0, len(members), micro_batch_size):
                micro = members[start : start + micro_batch_size]
                replay = stage.replay(rows.select(micro))
                order += micro
                log_probs.append(replay.log_probs.cpu())
                fingerprints.append(replay.fingerprints)
                layouts.append(replay.layouts)
    inverse = torch.argsort(torch.tensor(order))
    digests = None if any(f is None for f in fingerprints) else torch.cat(fingerprints).cpu()[inverse]
    records = None
    if all(found is not None for found in layouts):
        flat = [record for found in layouts for record in found]
        records = [flat[place] for place in inverse.tolist()]
    return torch.cat(log_probs)[inverse], digests, records
