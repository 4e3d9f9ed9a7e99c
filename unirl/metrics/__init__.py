# SPDX-License-Identifier: Apache-2.0
"""Where a run's numbers go.

`metrics.jsonl` always, TensorBoard, wandb and the console as asked, samples of evaluations as npz.
"""

from unirl.metrics.aggregate import Aggregate
from unirl.metrics.console import ConsoleSink, format_rollout
from unirl.metrics.jsonl import JsonlSink, lines_before, read_metrics
from unirl.metrics.samples import SampleSet, read_samples, write_samples
from unirl.metrics.sinks import MultiSink, TensorBoardSink, WandbSink, check_sinks, open_sinks

__all__ = [
    "Aggregate",
    "ConsoleSink",
    "JsonlSink",
    "MultiSink",
    "SampleSet",
    "TensorBoardSink",
    "WandbSink",
    "check_sinks",
    "format_rollout",
    "lines_before",
    "open_sinks",
    "read_metrics",
    "read_samples",
    "write_samples",
]
