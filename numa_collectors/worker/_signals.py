"""First Ctrl-C or SIGTERM: please; second: now."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from numa_collectors.worker._live import kill_all_workers

__all__ = ["StopSignals"]

_EXIT_PATIENCE_S = 60.0


class StopSignals:
    """Context manager: the first SIGINT or SIGTERM sets :attr:`requested` and calls the callbacks, nothing is raised.

    The second kills every worker of this process, gives the previous handlers back and raises ``KeyboardInterrupt``
    or ``SystemExit(143)``, so that nothing waits any longer.  Python delivers signals to the main thread only; in
    another thread the context installs nothing, and the main thread's own handlers stay in force: have them call
    :meth:`request` (a ``StopSignals(other.request)`` in the main thread does).  A main thread that ended by an uncaught
    ``KeyboardInterrupt``, with this one still running, counts as the first SIGINT; so does the interpreter's end, which
    waits for the end of the context, within a bound.

    A callback runs in a signal handler: it sets a flag or an event, and takes no lock that the main thread may hold.
    """

    def __init__(self, *callbacks: Callable[[str], None]) -> None:
        self._requested: str | None = None
        self._callbacks = callbacks
        self._previous: dict[int, Any] = {}
        self._left = threading.Event()

    @property
    def requested(self) -> str | None:
        """The first signal that came, or that :meth:`request` was told of; None before."""
        if self._requested is None and not self._previous and _main_thread_was_interrupted():
            self.request("SIGINT")
        return self._requested

    def request(self, signal_name: str = "SIGINT") -> None:
        """Do what the first ``signal_name`` ("SIGINT" or "SIGTERM") would; from any thread, also in a signal handler.

        Later calls change nothing.
        """
        if self._requested is None:
            self._requested = signal.Signals[signal_name].name
            for callback in self._callbacks:
                callback(self._requested)

    @property
    def active(self) -> bool:
        """Whether the handlers are in place."""
        return bool(self._previous)

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, the codes that shells know; 0 after neither."""
        name = self.requested
        return 0 if name is None else 128 + signal.Signals[name]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        else:
            _elsewhere.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()
        _elsewhere.discard(self)
        self._left.set()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested is None:
            self.request(signal.Signals(number).name)
            return
        self._restore()
        print(f"second {signal.Signals(number).name}: killing the workers", file=sys.stderr)
        kill_all_workers()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: a handler that was not installed from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _main_thread_was_interrupted() -> bool:
    """Whether the interpreter waits for the other threads after its main one was ended by Ctrl-C."""
    last = getattr(sys, "last_type", None)  # set where an uncaught exception is printed
    return last is KeyboardInterrupt and not threading.main_thread().is_alive()


_elsewhere: set[StopSignals] = set()


def _end_elsewhere() -> None:
    """Let what runs in other threads end in good order before the workers are killed.

    An interpreter that ends waits for its threads, but not for daemons, nor, before Python 3.13, for a thread whose
    ``join()`` a Ctrl-C has interrupted: it takes that one for ended.
    """
    deadline = time.monotonic() + _EXIT_PATIENCE_S
    waiting = list(_elsewhere)
    for signals in waiting:
        signals.request("SIGINT")
    for signals in waiting:
        signals._left.wait(max(0.0, deadline - time.monotonic()))


# After the one that kills all workers, so that it runs before that.
atexit.register(_end_elsewhere)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_elsewhere.clear)
