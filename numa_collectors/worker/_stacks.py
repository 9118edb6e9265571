"""Stacks of a worker that cannot answer: written by its ``faulthandler`` in a signal handler, read by the parent.

The file is anonymous and shared; the worker appends through its own copy of the descriptor, the parent reads by
position. No GIL and no cooperation is needed, only a process that takes signals: one that was stopped (SIGSTOP) or
sits in an uninterruptible kernel call (state D) has no stack to give.
"""

from __future__ import annotations

import os
import time

from numa_collectors.worker._child import STACK_SIGNAL
from numa_collectors.worker._spawn import anonymous_file

__all__ = ["StackFile", "process_state"]

_QUIET_S = 0.03
_PATIENCE_S = 1.0


def process_state(pid: int) -> str | None:
    """Return the state letter of proc(5), such as ``"T"`` for stopped; None without ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat[stat.rindex(b")") + 2 :].split()[0].decode()


class StackFile:
    """The file and how far it has been read; its owner serialises the calls."""

    def __init__(self, name: str) -> None:
        self.descriptor = anonymous_file(f"{name} stacks")
        self._read_bytes = 0
        self._asked_at: float | None = None
        self._grown_at: tuple[int, float] = (0, 0.0)

    def close(self) -> None:
        """Close the parent's copy; a second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def ask(self, pid: int, handler_ready: bool) -> bool:
        """Send the stack signal; False where no answer can come, since the signal would wait or kill."""
        if not (handler_ready and STACK_SIGNAL) or process_state(pid) in ("T", "t", "D", "Z", "X"):
            return False
        self._asked_at = time.monotonic()
        self._grown_at = (os.fstat(self.descriptor).st_size, self._asked_at)
        os.kill(pid, STACK_SIGNAL)
        return True

    def answered(self, now: float) -> bool:
        """Whether the answer is whole (the file has stopped growing) or is not to be waited for any longer."""
        if self._asked_at is None or self.descriptor < 0:
            return True
        size = os.fstat(self.descriptor).st_size
        if size != self._grown_at[0]:
            self._grown_at = (size, now)
        whole = size > self._read_bytes and now - self._grown_at[1] >= _QUIET_S
        return whole or now - self._asked_at > _PATIENCE_S

    def read_new(self) -> str | None:
        """Return what was written since the last call; None where that is nothing."""
        self._asked_at = None
        if self.descriptor < 0:
            return None
        size = os.fstat(self.descriptor).st_size
        raw = os.pread(self.descriptor, size - self._read_bytes, self._read_bytes)
        self._read_bytes = size
        return raw.decode("utf-8", "replace").strip() or None
