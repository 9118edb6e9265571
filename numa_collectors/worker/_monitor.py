"""Who hangs: heartbeats that stand still, starts that take too long.  Never blocks the thread that looks."""

from __future__ import annotations

import time

from numa_collectors.worker._failure import FailureKind
from numa_collectors.worker._handle import Handle
from numa_collectors.worker._stacks import process_state

__all__ = ["Monitor"]


class _Stopwatch:
    """Time without movement, as far as it was watched.

    One gap between two looks counts for at most a quarter of the limit: where the whole host slept, or the looking
    process itself was stopped, the others had no chance to move either.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.still_s = 0.0
        self._last_look: float | None = None

    def look(self, now: float, *, moved: bool) -> bool:
        """Add the time since the last look; True when the limit is reached."""
        if self.limit_s is None:
            return False
        gap_s = 0.0 if self._last_look is None else now - self._last_look
        self._last_look = now
        self.still_s = 0.0 if moved else self.still_s + min(gap_s, self.limit_s / 4)
        return self.still_s >= self.limit_s


class Monitor:
    """Watches one process: :meth:`look` as often as you like, at least four times in the shorter of the limits."""

    def __init__(self, handle: Handle, *, hang_timeout_s: float | None, start_timeout_s: float | None) -> None:
        self._handle = handle
        self._silence = _Stopwatch(hang_timeout_s)
        self._starting = _Stopwatch(start_timeout_s)
        self._wait = _Stopwatch(None)
        self._heartbeats = -1
        self._state_due_at = 0.0
        self._was_stopped = False
        self._sentence: tuple[FailureKind, str] | None = None

    def look(self) -> None:
        """Take messages, notice death and hanging; a worker that hangs is asked for its stack, then killed."""
        handle, now = self._handle, time.monotonic()
        if handle.starting:
            return
        with handle.lock:
            handle.check()
            if not handle.alive or handle.kill_requested:
                return
            if self._sentence is None:
                self._sentence = self._start_overdue(now) or self._silent_too_long(now)
                if self._sentence is None:
                    return
                handle.ask_for_stack()
            # The answer takes the worker some milliseconds: a later look fetches it.
            if handle.stacks.answered(now):
                kind, hint = self._sentence
                handle.condemn(kind, hint, handle.stacks.read_new())
                handle.force()

    def _start_overdue(self, now: float) -> tuple[FailureKind, str] | None:
        if not self._starting.look(now, moved=self._handle.ready or self._handle.stop_requested):
            return None
        hint = f"setup() had not returned after {self._starting.limit_s:g} s; {self._state_hint('give it more time')}"
        return "start-timeout", hint

    def _silent_too_long(self, now: float) -> tuple[FailureKind, str] | None:
        beat = self._handle.heartbeats != self._heartbeats
        self._heartbeats = self._handle.heartbeats
        if self._silence.limit_s is not None and self._waits_too_long(now, beat=beat):
            return (
                "hung",
                f"it was to wait for at most {self._wait.limit_s:g} s; {self._state_hint(f'phase {self._handle.phase}')}",
            )
        if not self._silence.look(now, moved=beat or (self._handle.excused and not self._stopped_waiting(now))):
            return None
        advice = "a step that takes long calls heartbeat(), one that blocks on purpose does so inside waiting()"
        return "hung", f"no heartbeat for {self._silence.still_s:.1f} s; {self._state_hint(advice)}"

    def _waits_too_long(self, now: float, *, beat: bool) -> bool:
        self._wait.limit_s = self._handle.wait_limit_s
        if self._wait.limit_s is None:
            self._wait = _Stopwatch(None)
        return self._wait.look(now, moved=beat)

    def _stopped_waiting(self, now: float) -> bool:
        """Whether the only excuse is a wait from which the worker cannot wake, since its process is stopped."""
        handle = self._handle
        if not handle.waiting_only or handle.pid is None or self._silence.limit_s is None:
            return False
        if now >= self._state_due_at:  # a read in /proc costs more than all the rest of a look
            self._state_due_at = now + self._silence.limit_s / 8
            self._was_stopped = process_state(handle.pid) in ("T", "t")
        return self._was_stopped

    def _state_hint(self, advice: str) -> str:
        state = None if self._handle.pid is None else process_state(self._handle.pid)
        if state in ("T", "t"):
            return "the process is stopped (SIGSTOP, or a debugger holds it)"
        if state == "D":
            return "the process is in an uninterruptible kernel call (a disk, a network file system, a driver)"
        return advice
