"""Acting on a placement: binding a thread before it starts a worker, and reading back what took effect.

Guarantees
    * Only the calling thread is bound, never wider than what it was given; after an exception it is what it was.
    * No return code is believed: what is asked for is validated first and read back afterwards.
    * What could not be read back is never reported as verified.
Assumes
    * Mask and memory policy are inherited by what the thread starts and kept across exec (sched_setaffinity(2),
      set_mempolicy(2)), so that a worker's interpreter is local from its first page on.
Not covered
    * Hugetlb pools, cgroup changes, and pages of files, which lie where the page cache has them.

The ladder: ``policy+cpu``, ``cpu+first-touch`` (a container's filter refuses policies: pages then follow the CPU,
regions a pinned toucher), ``cpu`` (the memory asked for is not that of the CPUs, or no nodes are known), ``none``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from numa_collectors.binding._apply import apply
from numa_collectors.binding._capacity import check_capacity, headroom_bytes
from numa_collectors.binding._caps import THREAD_VARIABLES, ThreadCaps, thread_caps
from numa_collectors.binding._inspect import inspect, recheck
from numa_collectors.binding._ladder import Probe, probe, probe_ladder, remedy
from numa_collectors.binding._request import (
    RUNGS,
    BindMode,
    BindPolicy,
    BindReport,
    BindRequest,
    Drift,
    Rung,
    Stray,
)

if TYPE_CHECKING:
    from numa_collectors.binding._bench import BenchPair, BenchReport, bench
    from numa_collectors.binding._exec import exec_bound, request_for

__all__ = [
    "RUNGS",
    "THREAD_VARIABLES",
    "BenchPair",
    "BenchReport",
    "BindMode",
    "BindPolicy",
    "BindReport",
    "BindRequest",
    "Drift",
    "Probe",
    "Rung",
    "Stray",
    "ThreadCaps",
    "apply",
    "bench",
    "check_capacity",
    "exec_bound",
    "headroom_bytes",
    "inspect",
    "probe",
    "probe_ladder",
    "recheck",
    "remedy",
    "request_for",
    "thread_caps",
]

# Loaded on first use: a worker that reads its binding back needs neither, and they load the machine's description.
_LAZY = {
    "BenchPair": "_bench",
    "BenchReport": "_bench",
    "bench": "_bench",
    "exec_bound": "_exec",
    "request_for": "_exec",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
