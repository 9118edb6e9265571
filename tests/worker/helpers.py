"""What several tests of workers need."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from numa_collectors.worker import PinnedWorker, WorkerFailure, WorkerGroup

PATIENCE_S = 60.0  # a bound for a loaded machine, never a measurement

_T = TypeVar("_T")


def until(condition: Callable[[], _T], what: str, timeout_s: float = PATIENCE_S) -> _T:
    """Look until ``condition`` holds, for what no descriptor can be waited for; return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        threading.Event().wait(0.005)
    return value


def first_event(worker: PinnedWorker) -> dict[str, object]:
    """Wait for an event of ``worker`` and return it."""
    event: dict[str, object] = until(worker.events, f"an event of {worker.name}")[0]
    return event


def first_failure(group: WorkerGroup) -> WorkerFailure:
    """Poll as a training loop does until a failure is reported."""
    return until(group.poll, "a failure")[0]


def is_running(pid: int) -> bool:
    """Whether ``pid`` executes anything: a zombie that nobody has reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def running(pids: Iterable[int]) -> list[int]:
    """Return those of ``pids`` that run."""
    return [pid for pid in pids if is_running(pid)]


def children() -> set[int]:
    """Return the pids of this process's children."""
    return {
        int(pid)
        for task in os.listdir("/proc/self/task")
        for pid in Path(f"/proc/self/task/{task}/children").read_text().split()
    }
