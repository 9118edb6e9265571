"""The worker as its user sees it: one class, subclassed, with a child's side and a parent's side."""

from __future__ import annotations

import abc
import contextlib
import copy
import enum
import time
from typing import Any, TypeVar

from numa_collectors.binding import BindReport, BindRequest, Drift
from numa_collectors.errors import BindingError, NumaCollectorsError, WorkerFailedError, WorkerStartTimeoutError
from numa_collectors.worker._child import Services
from numa_collectors.worker._failure import WorkerFailure, render_name
from numa_collectors.worker._handle import Handle
from numa_collectors.worker._launcher import Launcher
from numa_collectors.worker._waiting import wait_any

__all__ = ["PinnedWorker", "WorkerState", "raise_failure"]

_Self = TypeVar("_Self", bound="PinnedWorker")


class WorkerState(str, enum.Enum):
    """Where a worker is in its life."""

    CREATED = "CREATED"
    STARTING = "STARTING"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    EXITED = "EXITED"
    FAILED = "FAILED"


def raise_failure(failure: WorkerFailure) -> None:
    """Raise the error that belongs to ``failure``."""
    if failure.kind == "refused":
        raise BindingError(failure.summary, code=failure.code or "binding", errno=failure.errno)
    kind = WorkerStartTimeoutError if failure.kind == "start-timeout" else WorkerFailedError
    raise kind(str(failure), failure)


class PinnedWorker(abc.ABC):
    """A process that is born bound; subclass it with :meth:`step`, and :meth:`setup` and :meth:`teardown` if need be.

    The object is made in the parent and sent to the new process, so its attributes must be picklable; what is not
    (files, environments, threads) is made in ``setup()``.  In the child the phases run in order: setup, then step
    until it returns True or the parent asks to stop, then teardown.  An exception in any of them ends the worker and
    reaches the parent with its traceback.  Leaving in another way (``sys.exit(0)``, ``os._exit(0)``) is a failure
    whatever the exit code.

    ``role`` and ``rank`` name it (``collector[3]``), ``generation`` counts its restarts, ``bind`` says where it is to
    run.
    """

    role: str = "worker"
    rank: int = 0
    generation: int = 0
    bind: BindRequest = BindRequest()
    launcher: Launcher | None = None
    _handle: Handle | None = None
    _services: Services | None = None

    def __init__(
        self,
        *,
        role: str = "worker",
        rank: int = 0,
        generation: int = 0,
        bind: BindRequest | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.role = role
        self.rank = rank
        self.generation = generation
        self.bind = BindRequest() if bind is None else bind
        self.launcher = launcher

    @property
    def name(self) -> str:
        """The rendered name, ``collector[3]``."""
        return render_name(self.role, self.rank)

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} {self.name} generation {self.generation}>"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ("_handle", "_services", "launcher"):
            state.pop(name, None)
        return state

    # The child's side: what a subclass overrides.

    def setup(self) -> None:
        """Build what the steps need; runs once in the worker, bound, before the parent is told that it is ready."""
        return

    @abc.abstractmethod
    def step(self) -> bool | None:
        """Do one piece of work; return True when all work is done."""

    def teardown(self) -> None:
        """Release what ``setup()`` made; runs once if ``setup()`` succeeded, also after an exception in ``step()``."""
        return

    # The child's side: what a subclass calls.

    @property
    def should_stop(self) -> bool:
        """Whether the parent asked this worker to end; long steps look at it."""
        return self._in_child().control.stop_requested

    def heartbeat(self) -> None:
        """Say "alive and moving" within a long step; between steps the library does it."""
        self._in_child().heartbeat()

    def set_phase(self, phase: str) -> None:
        """Name what is being done now, up to 63 bytes; failure records show it."""
        self._in_child().control.set_phase(phase)

    def waiting(self, limit_s: float | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context for blocking on purpose, on a full ring say: such a worker is not taken for hung.

        ``limit_s`` is for work that takes long but not for ever, such as compiling or saving: beyond it the worker hangs.
        """
        return self._in_child().waiting(limit_s)

    def post_stats(self, stats: dict[str, Any]) -> None:
        """Offer statistics; a newer offer replaces one that was not taken yet, so send cumulative counters."""
        self._in_child().channel.post_stats(stats)

    def send_event(self, event: dict[str, Any]) -> None:
        """Send something small that must arrive, in order; never blocks."""
        self._in_child().channel.send("event", event)

    def set_result(self, result: Any) -> None:
        """Send the worker's result; the last one counts."""
        self._in_child().channel.send("result", result)

    def _in_child(self) -> Services:
        if self._services is None:
            raise NumaCollectorsError(f"{self.name}: this method works in the worker's own process, not in its parent")
        return self._services

    # The parent's side.

    def start(self, *, wait: bool = True) -> None:
        """Start the process and return at once; see :meth:`wait_ready`.

        Making a process takes some milliseconds.  With ``wait=False`` they are not waited for: what prevents the start
        is raised later, by :meth:`wait_ready` or the group's ``poll``.  For workers that were given a launcher.

        Raises ``BindingError`` where a required binding cannot be had, ``NumaCollectorsError`` where the object
        cannot be pickled; no process exists then.
        """
        if self._services is not None or self._handle is not None:
            raise NumaCollectorsError(f"{self.name} was started before; a successor() can be started")
        self._handle = Handle(self)
        try:
            if wait or self.launcher is None:
                self._handle.start()
            else:
                self._handle.order_start()
        except BaseException:
            self._handle = None
            raise

    def wait_ready(self, timeout_s: float) -> BindReport:
        """Wait until ``setup()`` has returned; return what its binding was found to be.

        Raises ``WorkerFailedError`` if the worker ends before that, ``BindingError`` if its binding was required and
        does not hold, ``WorkerStartTimeoutError`` after ``timeout_s``; the worker is dead then.
        """
        handle = self._started()
        deadline = time.monotonic() + timeout_s
        handle.wait_started(timeout_s)
        while True:
            handle.check()
            if handle.start_error is not None:
                raise handle.start_error
            if handle.failure is not None:
                raise_failure(handle.failure)
            if handle.ready and handle.bind_report is not None:
                return handle.bind_report
            if not handle.alive:
                raise WorkerFailedError(f"{self.name} was stopped before it became ready")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._give_up_start(handle, timeout_s)
            wait_any([handle], left_s)

    def _give_up_start(self, handle: Handle, timeout_s: float) -> None:
        stack = self.stack_dump()
        handle.condemn("start-timeout", f"setup() had not returned after {timeout_s:g} s; give it more time", stack)
        handle.force()
        handle.join(5.0)
        if handle.failure is not None:
            raise_failure(handle.failure)

    def request_stop(self) -> None:
        """Ask the worker to end after its current step; returns at once."""
        if self._handle is not None:
            self._handle.request_stop()

    def kill(self) -> None:
        """Kill the process and its process group at once; no failure is recorded for it.  Then :meth:`join`."""
        if self._handle is not None:
            self._handle.kill()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False after ``timeout_s``."""
        return self._handle is None or self._handle.join(timeout_s)

    def poll(self) -> WorkerFailure | None:
        """Take messages, notice death; return the failure record if there is one.  Never blocks."""
        return self.failure

    def recheck(self, timeout_s: float = 5.0) -> tuple[Drift, ...]:
        """Have the worker look at its binding again, between two steps; return what is no longer as it was.

        Raises ``TimeoutError`` if no step ends in time, ``WorkerFailedError`` if the worker ends.
        """
        handle = self._started()
        number = self.request_recheck()
        deadline = time.monotonic() + timeout_s
        while True:
            handle.check()
            if handle.drift_number >= number > 0:
                return handle.drift
            if not handle.alive:
                raise WorkerFailedError(f"{self.name} has ended, its binding cannot be looked at", handle.failure)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.name} did not look at its binding within {timeout_s:g} s: no step ended")
            wait_any([handle], left_s)

    def request_recheck(self) -> int:
        """Ask for a look at the binding without waiting; the answer appears as :attr:`drift`."""
        handle = self._started()
        with handle.lock:
            return handle.control.request_recheck() if handle.alive else 0

    def stack_dump(self, timeout_s: float = 1.0) -> str | None:
        """Return the Python stacks of all threads of the running worker, whatever it is doing.

        None where it cannot answer: not born yet, ended, stopped (SIGSTOP), or in an uninterruptible kernel call.
        """
        handle = self._handle
        if handle is None or not handle.ask_for_stack():
            return None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not handle.stack_answered():
            wait_any([], 0.01)
        with handle.lock:
            return handle.stacks.read_new()

    @property
    def stats(self) -> Any:
        """The newest statistics, or None."""
        return self._checked("stats")

    def events(self) -> list[Any]:
        """Return the events that have come since the last call, in order."""
        handle = self._handle
        if handle is None:
            return []
        handle.check()
        with handle.lock:
            events = list(handle.events)
            handle.events.clear()
        return events

    @property
    def result(self) -> Any:
        """What the worker set last by ``set_result``, or None."""
        return self._checked("result")

    @property
    def failure(self) -> WorkerFailure | None:
        """The failure record of a worker that has ended badly."""
        failure: WorkerFailure | None = self._checked("failure")
        return failure

    @property
    def bind_report(self) -> BindReport | None:
        """What the worker's binding was found to be before its own code ran."""
        report: BindReport | None = self._checked("bind_report")
        return report

    @property
    def drift(self) -> tuple[Drift, ...]:
        """What had changed at the last look: after ``setup()``, then whenever a recheck was asked for."""
        drift: tuple[Drift, ...] | None = self._checked("drift")
        return drift or ()

    @property
    def finished(self) -> bool:
        """Whether ``step()`` returned True and teardown went well."""
        return bool(self._checked("finished"))

    @property
    def pid(self) -> int | None:
        """The process's pid, also after its end."""
        return None if self._handle is None else self._handle.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code: int | None = self._checked("exit_code")
        return code

    @property
    def sentinel(self) -> int | None:
        """A descriptor that is readable at the process's end (a pidfd on Linux); None when there is no process."""
        descriptors = () if self._handle is None else self._handle.descriptors()
        return descriptors[1] if descriptors else None

    @property
    def num_steps(self) -> int:
        """How many calls of ``step()`` have returned."""
        return int(self._checked("num_steps") or 0)

    @property
    def phase(self) -> str | None:
        """What the worker is doing, or was doing last."""
        phase: str | None = self._checked("phase")
        return phase

    @property
    def state(self) -> WorkerState:
        """Where the worker is in its life, looked up now."""
        handle = self._handle
        if handle is None:
            return WorkerState.CREATED
        handle.check()
        with handle.lock:
            if handle.reaped:
                return WorkerState.FAILED if handle.failure or handle.start_error else WorkerState.EXITED
            if handle.stop_requested or handle.kill_requested or handle.done:
                return WorkerState.STOPPING
            if not handle.ready:
                return WorkerState.STARTING
            return WorkerState.RUNNING if handle.heartbeats else WorkerState.READY

    def successor(self: _Self) -> _Self:
        """Return a worker of the next generation, not started: a shallow copy of what this object was when it was made.

        Override it where a generation must differ in more than its number.
        """
        worker = copy.copy(self)
        worker.launcher = self.launcher
        worker.generation = self.generation + 1
        return worker

    def _started(self) -> Handle:
        if self._handle is None:
            raise NumaCollectorsError(f"{self.name} has not been started; call start() first")
        return self._handle

    def _checked(self, attribute: str) -> Any:
        handle = self._handle
        if handle is None:
            return None
        handle.check()
        return getattr(handle, attribute)
