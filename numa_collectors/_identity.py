"""Which process is meant: pid with start time, and what happens to shared-memory endpoints across ``fork``.

A pid alone is reused; a pid with its start time (field 22 of ``/proc/PID/stat``, clock ticks after boot, proc(5)) is
not.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["ForkGuarded", "guard_fork", "is_running", "process_start_time"]


def process_start_time(pid: int) -> int | None:
    """Start time of ``pid`` in clock ticks after boot; None when it does not run (a zombie does not).

    Without procfs the start time is 0 for any process that exists.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except FileNotFoundError:
        return _start_time_without_procfs(pid)
    except ProcessLookupError:
        return None
    # The command name in parentheses may hold anything, parentheses and spaces included: fields count from the last
    # ")".
    fields = stat[stat.rindex(b")") + 2 :].split()
    if fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def _start_time_without_procfs(pid: int) -> int | None:
    if os.path.exists("/proc/self/stat"):
        return None
    if os.name == "nt":
        return 0 if pid == os.getpid() else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0
    return 0


def is_running(pid: int, start_time: int) -> bool:
    """Whether the process that had ``pid`` and ``start_time`` still runs."""
    return pid > 0 and process_start_time(pid) == start_time


class ForkGuarded(Protocol):
    """Something that must not be used in a forked child."""

    def _after_fork(self) -> None: ...


_guarded: weakref.WeakSet[ForkGuarded] = weakref.WeakSet()


def guard_fork(endpoint: ForkGuarded) -> None:
    """Have ``endpoint._after_fork()`` called in every child that this process forks from now on."""
    _guarded.add(endpoint)


def _after_fork_in_child() -> None:
    for endpoint in list(_guarded):
        endpoint._after_fork()
    _guarded.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
