"""Metrics of a run: one table of tags, a hub that turns workers' counters into them, sinks and consoles that take them.

Imports the standard library only; tensorboard, rich and psutil are imported when what needs them is built.
"""

from __future__ import annotations

from numa_collectors.metrics.bottleneck import Bottleneck, find_bottleneck
from numa_collectors.metrics.console import (
    Console,
    ConsolePanel,
    PlainConsole,
    QuietConsole,
    make_console,
)
from numa_collectors.metrics.counters import LagHistogram, LagStats, lag_stats
from numa_collectors.metrics.hub import LogPoint, MetricsHub, Window, WorkerView
from numa_collectors.metrics.names import STAGES, TABLE, Metric, metrics_markdown, tags_of
from numa_collectors.metrics.processes import process_tree, process_usage
from numa_collectors.metrics.sinks import JsonlSink, Sink, TensorBoardSink, check_run_dir

__all__ = [
    "STAGES",
    "TABLE",
    "Bottleneck",
    "Console",
    "ConsolePanel",
    "JsonlSink",
    "LagHistogram",
    "LagStats",
    "LogPoint",
    "Metric",
    "MetricsHub",
    "PlainConsole",
    "QuietConsole",
    "Sink",
    "TensorBoardSink",
    "Window",
    "WorkerView",
    "check_run_dir",
    "find_bottleneck",
    "lag_stats",
    "make_console",
    "metrics_markdown",
    "process_tree",
    "process_usage",
    "tags_of",
]
