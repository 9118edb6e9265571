"""First Ctrl-C or SIGTERM: please; second: now."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from numa_collectors.worker._live import kill_all_workers

__all__ = ["StopSignals"]


class StopSignals:
    """Context manager: the first SIGINT or SIGTERM sets :attr:`requested` and calls the callbacks, nothing is raised.

    The second kills every worker of this process, gives the previous handlers back and raises ``KeyboardInterrupt``
    or ``SystemExit(143)``, so that nothing waits any longer.  Python delivers signals to the main thread only; in
    another thread the context does nothing, and the main thread's own handlers stay in force.

    A callback runs in a signal handler: it sets a flag or an event, and takes no lock that the main thread may hold.
    """

    def __init__(self, *callbacks: Callable[[str], None]) -> None:
        self.requested: str | None = None
        self._callbacks = callbacks
        self._previous: dict[int, Any] = {}

    @property
    def active(self) -> bool:
        """Whether the handlers are in place."""
        return bool(self._previous)

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM, the codes that shells know; 0 after neither."""
        return 0 if self.requested is None else 128 + signal.Signals[self.requested]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name
            for callback in self._callbacks:
                callback(self.requested)
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
