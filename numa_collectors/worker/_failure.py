"""The record of a worker that did not end well, and how an exit reads in words."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

__all__ = ["FailureKind", "WorkerFailure", "describe_exit", "hint_for", "render_name", "signal_name"]

FailureKind = Literal["raised", "died", "left", "hung", "start-timeout", "stop-timeout", "refused"]

_BUS_ERROR = (
    "a page of mapped memory could not be supplied: a memory limit (cgroup, /dev/shm, a NUMA node under the policy "
    "'bind'), or a file that shrank while it was mapped; compare the limits with the sizes that explain() shows"
)
_SEGFAULT = "native code of the environment or of a library crashed; the stack shows which call it was in"
_KILLED = (
    "somebody sent SIGKILL: an operator, a job scheduler, or an out-of-memory killer whose counters cannot be read "
    "here (see `dmesg`)"
)
_LEFT = "it left by itself: an exit code is no success, only a finished step() or a requested stop is"
_NOT_BORN = (
    "it died before the library's first line in it: the reason stands on its standard error; is the main script's "
    'start guarded by `if __name__ == "__main__":`?'
)


def render_name(role: str, rank: int) -> str:
    """Render a worker's name, ``collector[3]``; everywhere the same."""
    return f"{role}[{rank}]"


def signal_name(exit_code: int | None) -> str | None:
    """Name the signal that ended a process, or None."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # real-time signals have numbers only
        return f"signal {-exit_code}"


def describe_exit(exit_code: int | None) -> str:
    """Say how a process ended."""
    if exit_code is None:
        return "still running"
    name = signal_name(exit_code)
    return f"exit code {exit_code}" if name is None else f"killed by {name}"


def hint_for(exit_code: int | None, phase: str, out_of_memory: str | None) -> str | None:
    """Say what most likely happened and what to do about it."""
    name = signal_name(exit_code)
    if name == "SIGKILL":
        return out_of_memory or _KILLED
    if name == "SIGBUS":
        return out_of_memory or _BUS_ERROR
    if name in ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"):
        return _SEGFAULT
    if name is not None:
        return f"somebody sent {name} to this process alone"
    if phase == "spawn":
        return _NOT_BORN
    return _LEFT


@dataclass(frozen=True)
class WorkerFailure:
    """One worker's end, as far as it is known; picklable, and readable by ``str()``.

    ``exit_code`` is the process's own, negative for a signal, None while it could not be reaped; ``phase`` what it
    was doing; ``last_heartbeat_age_s`` the time from its last sign of life to the moment at which the failure was
    seen, None when there was no sign; ``traceback`` the exception that ended it; ``stack`` where it was stuck or
    crashed; ``num_steps`` the calls of ``step()`` that had returned; ``finished`` whether its work was done and only
    its end went wrong; ``code`` and ``errno`` those of a ``BindingError``.
    """

    role: str
    rank: int
    generation: int
    kind: FailureKind
    pid: int | None = None
    exit_code: int | None = None
    signal_name: str | None = None
    phase: str = "spawn"
    last_heartbeat_age_s: float | None = None
    traceback: str | None = None
    stack: str | None = None
    hint: str | None = None
    message: str | None = None
    num_steps: int = 0
    finished: bool = False
    code: str | None = None
    errno: int | None = None

    @property
    def name(self) -> str:
        """The worker's rendered name."""
        return render_name(self.role, self.rank)

    @property
    def summary(self) -> str:
        """One line, without traceback and stack."""
        what = {
            "raised": f"raised {self.message or 'an exception'}",
            "died": f"died, {describe_exit(self.exit_code)}",
            "left": f"left with {describe_exit(self.exit_code)} before its work was done",
            "hung": "hung",
            "start-timeout": "did not become ready in time",
            "stop-timeout": "did not stop in time and was killed",
            "refused": f"was not bound as required: {self.message}",
        }[self.kind]
        details = [f"phase {self.phase}", f"{self.num_steps} steps done"]
        if self.pid is not None:
            details.insert(0, f"pid {self.pid}")
        if self.generation:
            details.insert(0, f"generation {self.generation}")
        if self.last_heartbeat_age_s is not None:
            details.append(f"last heartbeat {self.last_heartbeat_age_s:.1f} s before")
        if self.finished:
            details.append("its work was done")
        hint = f": {self.hint}" if self.hint else ""
        return f"{self.name} {what} ({', '.join(details)}){hint}"

    def __str__(self) -> str:
        parts = [self.summary]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.stack:
            parts.append("stack:\n" + self.stack.rstrip())
        return "\n".join(parts)
