"""Which process is meant: pid with start time; who holds an end of shared memory, and what a fork does to it.

A pid alone is reused; a pid with its start time (field 22 of ``/proc/PID/stat``, clock ticks after boot, proc(5)) is
not.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, Protocol

from numa_collectors.errors import NumaCollectorsError

__all__ = [
    "C_GENERATION",
    "C_LIVE",
    "C_PID",
    "C_START",
    "ForkGuarded",
    "Gone",
    "claim_holder",
    "guard_fork",
    "is_running",
    "process_start_time",
    "write_claim",
]

C_PID, C_START, C_GENERATION, C_LIVE = range(4)
"""Words of a claim on an end of shared memory."""


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


def claim_holder(words: memoryview, claim: int) -> int | None:
    """Pid of the live process that holds the claim whose words begin at ``claim``, or None."""
    if words[claim + C_LIVE] and is_running(words[claim + C_PID], words[claim + C_START]):
        return int(words[claim + C_PID])
    return None


def write_claim(words: memoryview, claim: int, generation: int = 0) -> None:
    """Make this process the holder; LIVE is down while the rest is written.

    Two processes that claim in the same instant are not told apart: a supervisor starts a successor after it saw the
    predecessor's death.
    """
    words[claim + C_LIVE] = 0
    words[claim + C_PID] = os.getpid()
    words[claim + C_START] = process_start_time(os.getpid()) or 0
    words[claim + C_GENERATION] = generation
    words[claim + C_LIVE] = 1


class Gone:
    """Stands in for the words of an end that may no longer be used: every access raises ``message``."""

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any) -> NoReturn:
        raise NumaCollectorsError(self._message)

    __getitem__ = _refuse
    __setitem__ = _refuse


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
