"""Several workers under one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from numa_collectors.binding import BindReport
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker._descriptors import ensure_descriptors
from numa_collectors.worker._failure import WorkerFailure
from numa_collectors.worker._handle import Handle
from numa_collectors.worker._launcher import Launcher
from numa_collectors.worker._monitor import Monitor
from numa_collectors.worker._pinned import PinnedWorker, raise_failure
from numa_collectors.worker._waiting import wait_any

__all__ = ["WorkerGroup"]

_STACKS_TIMEOUT_S = 0.8
_REAP_TIMEOUT_S = 2.0


class WorkerGroup:
    """Starts, watches and ends workers; a context manager that leaves none behind.

    ``hang_timeout_s``: a worker that is neither moving (heartbeats) nor ``waiting()`` for that long is killed and
    reported, with its stack.  ``start_timeout_s``: so is one whose ``setup()`` takes longer, also after a restart.
    None switches either off.  Both need :meth:`poll` to be called at least four times within the limit; death is
    noticed by any call. ``shutdown_timeout_s`` bounds the end of the ``with`` block.  ``successor`` makes the worker
    that :meth:`restart` starts; the default is ``worker.successor()``.
    """

    def __init__(
        self,
        workers: Sequence[PinnedWorker],
        *,
        hang_timeout_s: float | None = None,
        start_timeout_s: float | None = None,
        shutdown_timeout_s: float = 10.0,
        successor: Callable[[PinnedWorker], PinnedWorker] | None = None,
    ) -> None:
        names = [worker.name for worker in workers]
        if len(set(names)) != len(names):
            raise NumaCollectorsError(f"expected workers with different names, got {names}; give each its own rank")
        self.workers: list[PinnedWorker] = list(workers)
        self.first_failure: WorkerFailure | None = None
        self._hang_timeout_s = hang_timeout_s
        self._start_timeout_s = start_timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._successor = successor or (lambda worker: worker.successor())
        self._launcher: Launcher | None = None
        self._monitors: dict[Handle, Monitor] = {}

    def start(self) -> None:
        """Start all; if one cannot be started, those that were are killed and its error is raised.

        Raises the soft limit of open files where it is too low for all of them, and ``NumaCollectorsError`` before the
        first is started where the hard limit is.
        """
        ensure_descriptors(len(self.workers))
        try:
            for worker in self.workers:
                self._start(worker)
        except BaseException:
            self.kill()
            raise

    def wait_ready(self, timeout_s: float) -> list[BindReport]:
        """Wait until all are ready; return their reports in order.  Raises as ``PinnedWorker.wait_ready`` does."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._raise_first()
            waiting = [handle for handle in self._handles() if not handle.ready]
            left_s = deadline - time.monotonic()
            if not waiting or left_s <= 0:
                break
            wait_any(waiting, left_s)
        # Those that are late now get no further time each, and the first of them raises.
        return [worker.wait_ready(0.0) for worker in self.workers]

    def poll(self) -> list[WorkerFailure]:
        """Take messages, notice deaths, hangs and late starts; return the failures that are new.  Never blocks."""
        for handle in self._handles():
            if handle not in self._monitors:
                self._monitors[handle] = Monitor(
                    handle, hang_timeout_s=self._hang_timeout_s, start_timeout_s=self._start_timeout_s
                )
            self._monitors[handle].look()
            if handle.start_error is not None:
                raise handle.start_error
        return self._new_failures(checked=True)

    def wait(self, timeout_s: float) -> None:
        """Block until a worker has a message or ends, for at most ``timeout_s`` and half a second."""
        wait_any([handle for handle in self._handles() if handle.alive], timeout_s)

    def stop(self, timeout_s: float | None = None) -> list[WorkerFailure]:
        """End all within ``timeout_s``: stop flag, then SIGTERM, then SIGKILL; reap, and return new failures.

        A worker that had to be killed is one of them, with its stack.  May be called again, from any thread, at any
        time.
        """
        timeout_s = self._shutdown_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        reserve_s = min(1.0, 0.3 * timeout_s)
        handles = self._handles()
        try:
            for handle in handles:
                handle.request_stop()
            if not _join_all(handles, deadline - reserve_s):
                self._escalate(handles, timeout_s, deadline)
        except BaseException:
            self.kill()
            raise
        failures = self._new_failures()
        self._close_launcher()
        return failures

    def kill(self) -> None:
        """SIGKILL to all and to their process groups, and reap."""
        handles = self._handles()
        for handle in handles:
            handle.kill()
        _join_all(handles, time.monotonic() + _REAP_TIMEOUT_S)
        self._close_launcher()

    def restart(self, worker: PinnedWorker) -> PinnedWorker:
        """Replace ``worker`` by the next generation and start it; the old process is gone before the new one begins.

        Returns the new worker at once, its process to be started by another thread; wait with its ``wait_ready``, or let
        :meth:`poll` watch its start and raise what prevents it.
        """
        index = self.workers.index(worker)
        if worker._handle is not None:
            worker._handle.kill()
            if not worker._handle.join(_REAP_TIMEOUT_S):
                raise NumaCollectorsError(
                    f"{worker.name} (pid {worker.pid}) cannot be killed, so it cannot be replaced"
                )
            self._monitors.pop(worker._handle, None)
        following = self._successor(worker)
        self.workers[index] = following
        self._start(following, wait=False)
        return following

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, worker: PinnedWorker, *, wait: bool = True) -> None:
        if worker.launcher is None:
            if self._launcher is None:
                self._launcher = Launcher()
            worker.launcher = self._launcher
        worker.start(wait=wait)

    def _handles(self) -> list[Handle]:
        return [worker._handle for worker in self.workers if worker._handle is not None]

    def _raise_first(self) -> None:
        for handle in self._handles():
            handle.check()
            if handle.start_error is not None:
                raise handle.start_error
            if handle.failure is not None:
                self._new_failures()
                raise_failure(handle.failure)

    def _new_failures(self, *, checked: bool = False) -> list[WorkerFailure]:
        failures = []
        for handle in self._handles():
            if not checked:
                handle.check()
            if handle.failure is not None and not handle.reported:
                handle.reported = True
                failures.append(handle.failure)
        if failures and self.first_failure is None:
            self.first_failure = failures[0]
        return failures

    def _escalate(self, handles: list[Handle], timeout_s: float, deadline: float) -> None:
        late = [handle for handle in handles if handle.alive]
        asked = [handle for handle in late if handle.ask_for_stack()]
        begun = time.monotonic()
        until = begun + min(_STACKS_TIMEOUT_S, 0.8 * (deadline - begun))  # what is left after it is for dying
        while time.monotonic() < until and not all(handle.stack_answered() for handle in asked):
            wait_any([], 0.01)
        for handle in late:
            hint = f"it had not ended within its share of {timeout_s:g} s after it was asked to"
            with handle.lock:
                handle.condemn("stop-timeout", hint, handle.stacks.read_new())
            handle.terminate()
        _join_all(late, (time.monotonic() + deadline) / 2)
        for handle in late:
            handle.force()
        _join_all(late, max(deadline, time.monotonic() + _REAP_TIMEOUT_S))

    def _close_launcher(self) -> None:
        launcher = self._launcher
        if launcher is None or any(handle.alive or handle.starting for handle in self._handles()):
            return
        self._launcher = None
        for worker in self.workers:
            if worker.launcher is launcher:
                worker.launcher = None
        launcher.close()


def _join_all(handles: list[Handle], deadline: float) -> bool:
    """Wait for all ends, taking messages meanwhile; False at the deadline."""
    for handle in handles:
        handle.wait_started(max(0.0, deadline - time.monotonic()))
    while True:
        for handle in handles:
            handle.check()
        alive = [handle for handle in handles if handle.alive or handle.starting]
        if not alive:
            return True
        if time.monotonic() >= deadline:
            return False
        wait_any(alive, deadline - time.monotonic())
