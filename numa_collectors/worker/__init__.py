"""Workers: processes that are born bound, say what they are, end when asked, and leave nothing behind.

Guarantees
    * A worker's process holds its CPU affinity and memory policy before its first instruction; what took effect was
      read back in the worker before any of the user's code ran.  The caller's own mask, policy and environment stay
      as they are.
    * Nothing that a worker may hold when it is killed is waited for by anybody: no lock, no barrier and no queue is
      shared.
    * Every end that was not asked for becomes a :class:`WorkerFailure`; an exit code alone is never taken for success.
    * When the parent dies, however it dies, its workers and what they started are killed; an orderly stop leaves no
      process, no descriptor and no name in the file system either.
Assumes
    * Linux.  On other POSIX systems workers run unbound, and only process groups are cleared up.
Not covered
    * A descendant that leaves the worker's process group and clears its environment, both.
    * A process that the kernel itself cannot kill (state D) is left to end when its kernel call does.
"""

from __future__ import annotations

from numa_collectors.worker._descriptors import ensure_descriptors
from numa_collectors.worker._failure import FailureKind, WorkerFailure, render_name
from numa_collectors.worker._group import WorkerGroup
from numa_collectors.worker._launcher import Launcher
from numa_collectors.worker._live import kill_all_workers
from numa_collectors.worker._pinned import PinnedWorker, WorkerState, raise_failure
from numa_collectors.worker._signals import StopSignals

__all__ = [
    "FailureKind",
    "Launcher",
    "PinnedWorker",
    "StopSignals",
    "WorkerFailure",
    "WorkerGroup",
    "WorkerState",
    "ensure_descriptors",
    "kill_all_workers",
    "raise_failure",
    "render_name",
]
