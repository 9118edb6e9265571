"""Processes are born bound: started from one long-lived thread that already holds their affinity and memory policy.

Guarantees: both are inherited through fork and kept across exec, so the worker's very interpreter is local; the
thread that calls :meth:`Launcher.start_process` keeps its own mask and policy, also after an exception; the thread
caps stand in the child's environment before its first library loads, and ``os.environ`` is as before afterwards.
Assumes: nobody starts another process from another thread while a worker is being started; such a process would see the
caps too.
Not covered: a thread that the user's code creates in the worker and binds itself; ``recheck()`` finds it.

Kernel facts: sched_setaffinity(2) and set_mempolicy(2) act on the calling thread and are inherited; a parent-death
signal is tied to the thread that created the child (prctl(2), PR_SET_PDEATHSIG), so the thread lives until its last
child is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from types import TracebackType

from numa_collectors.binding import BindRequest, apply, thread_caps
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker._guardian import MARK_VARIABLE, Guardian

__all__ = ["Job", "Launcher", "shared_launcher"]

_environ_lock = threading.Lock()


@dataclass
class Job:
    """A start that was asked for: ``done`` when it has been made or has failed with ``error``."""

    work: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Launcher:
    """The launcher thread and the guardian; both start with the first process and end with :meth:`close`."""

    def __init__(self) -> None:
        self.guardian = Guardian()
        self._owner_pid = os.getpid()
        self._lock = threading.RLock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def thread_id(self) -> int | None:
        """The launcher thread's kernel id while it lives."""
        return None if self._thread is None else self._thread.native_id

    def start_process(self, start: Callable[[], None], request: BindRequest, mark: str) -> None:
        """Call ``start``, which forks and execs, in the launcher thread bound by ``request``.

        Raises what ``start`` or the binding raises; nothing has been started then.
        """
        job = self.order_process(start, request, mark)
        job.done.wait()
        if job.error is not None:
            raise job.error

    def order_process(self, start: Callable[[], None], request: BindRequest, mark: str) -> Job:
        """As :meth:`start_process`, without waiting; starts are made in the order in which they were asked for."""
        if sys.platform == "win32":
            raise NumaCollectorsError("worker processes need POSIX; on Windows only reading and planning are available")
        job = Job(lambda: self._start_bound(start, request, mark))
        with self._lock:
            self._check_usable()
            if self._thread is None:
                # A daemon, since the interpreter joins other threads before it runs the exit handler that ends this
                # one.
                self._thread = threading.Thread(target=self._serve, name="numa-launcher", daemon=True)
                self._thread.start()
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread and the guardian; the kernel kills what was started here and still runs."""
        with self._lock:
            if self._closed or self._owner_pid != os.getpid():
                return
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            thread.join()
        self.guardian.close()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise NumaCollectorsError("this launcher is closed; make a new one")
        if self._owner_pid != os.getpid():
            raise NumaCollectorsError("this launcher belongs to another process, of which this one is a fork")

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that asked
                job.error = error
            job.done.set()

    def _start_bound(self, start: Callable[[], None], request: BindRequest, mark: str) -> None:
        # Both before the binding, since both inherit this thread's mask and outlive the worker.
        resource_tracker.ensure_running()
        self.guardian.start()
        # Inherited across exec: until the worker leads a process group of its own, a Ctrl-C at the terminal reaches
        # it too. Only after the tracker, whose start ends by unblocking the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            apply(request)
            with _exported(_environment(request, mark)):
                start()
        finally:
            apply(BindRequest())  # back to what the thread was born with


def _environment(request: BindRequest, mark: str) -> dict[str, str]:
    caps = thread_caps(request.num_threads)
    outer = os.environ.get(MARK_VARIABLE)
    return {**caps, MARK_VARIABLE: mark if outer is None else f"{outer}:{mark}"}


@contextlib.contextmanager
def _exported(variables: Mapping[str, str]) -> Iterator[None]:
    with _environ_lock:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


class _Shared:
    """The launcher of workers that were given none, alive while one of them is."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._launcher: Launcher | None = None
        self._num_users = 0

    def acquire(self) -> Launcher:
        with self._lock:
            if self._launcher is None or self._launcher._owner_pid != os.getpid():
                self._launcher, self._num_users = Launcher(), 0
            self._num_users += 1
            return self._launcher

    def release(self, launcher: Launcher) -> None:
        with self._lock:
            if launcher is not self._launcher:
                return
            self._num_users -= 1
            if self._num_users:
                return
            self._launcher = None
        launcher.close()


shared_launcher = _Shared()
