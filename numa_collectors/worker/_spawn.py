"""A multiprocessing *spawn* process whose first act is the library's, not the user's.

The worker object travels as a second pickle, in an anonymous file, and is loaded only after the child has been
isolated and its binding read back: importing the user's modules happens under watch, and a failing import is reported
like any other exception.  The spawn pipe itself carries a few kilobytes, so that a child that is stopped at birth
blocks nobody.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction, util
from typing import TYPE_CHECKING, Any

from numa_collectors.binding import BindRequest
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.shm import Region

if TYPE_CHECKING:
    from numa_collectors.worker._pinned import PinnedWorker

__all__ = ["Boot", "WorkerProcess", "anonymous_file"]


def anonymous_file(name: str) -> int:
    """Return the descriptor of an empty file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    import tempfile  # costs a child 15 ms of imports, and Linux has no need of it

    descriptor, path = tempfile.mkstemp(prefix="numa_collectors_")
    os.unlink(path)
    return descriptor


@dataclass
class Boot:
    """What the child needs before it may load the worker; descriptors are valid in the child only."""

    name: str
    request: BindRequest
    control: Region
    channel: Any  # multiprocessing's wrapper; detach() returns the descriptor
    stack: Any
    payload: Any


class WorkerProcess(context.SpawnProcess):
    """The process object; ``on_pid`` is called with the pid before the child is given anything to run."""

    def __init__(
        self, worker: PinnedWorker, control: Region, channel: socket.socket, stack: int, on_pid: Callable[[int], None]
    ) -> None:
        super().__init__(name=worker.name)
        self._worker = worker
        self._wires = (control, channel.fileno(), stack)
        self.on_pid: Callable[[int], None] | None = on_pid
        self._boot: Boot | None = None
        self._payload = -1

    def release_payload(self) -> None:
        """Close the parent's copy of the pickled worker."""
        if self._payload >= 0:
            os.close(self._payload)
            self._payload = -1

    def run(self) -> None:
        """Run in the child."""
        from numa_collectors.worker._child import run_worker

        assert self._boot is not None
        run_worker(self._boot)

    def _bootstrap(self, parent_sentinel: int | None = None) -> Any:
        """Run in the child: end as a forked child of multiprocessing does, without taking the interpreter apart.

        That would cost tens of milliseconds of every worker's end, seconds with large libraries, whose destructors like to
        crash there.  Exit handlers and threads have had their turn before.
        """
        code = super()._bootstrap(parent_sentinel)  # type: ignore[misc]
        atexit._run_exitfuncs()
        util._flush_std_streams()  # type: ignore[attr-defined]
        os._exit(code)

    def __getstate__(self) -> dict[str, Any]:
        pickled = _pickled(self._worker)
        self._payload = anonymous_file(f"{self.name} worker")
        with open(self._payload, "wb", closefd=False) as file:
            file.write(pickled)
        os.lseek(self._payload, 0, os.SEEK_SET)  # the child's copy of the descriptor shares the position
        control, channel, stack = self._wires
        boot = Boot(
            self.name,
            self._worker.bind,
            control,
            channel=reduction.DupFd(channel),
            stack=reduction.DupFd(stack),
            payload=reduction.DupFd(self._payload),
        )
        return {**self.__dict__, "_worker": None, "_wires": None, "on_pid": None, "_boot": boot, "_payload": -1}

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _WatchedPopen(process_obj)


def _pickled(worker: PinnedWorker) -> bytes:
    kind = type(worker)
    main = sys.modules["__main__"]
    if kind.__module__ == "__main__" and getattr(main, "__file__", None) is None and main.__spec__ is None:
        raise NumaCollectorsError(
            f"{worker.name}: a new process cannot find the class {kind.__qualname__}, which was typed into a notebook "
            "or an interactive session: move it into a module and import it"
        )
    try:
        return bytes(reduction.ForkingPickler.dumps(worker))
    except Exception as error:
        raise NumaCollectorsError(
            f"{worker.name}: a {kind.__module__}.{kind.__qualname__} cannot be sent to a new process "
            f"({type(error).__name__}: {error}); no process was started.  Define the class at the top of a module, and "
            "create files, locks, environments and other things that do not travel in setup()"
        ) from error


if sys.platform != "win32":
    from multiprocessing import popen_spawn_posix

    class _WatchedPopen(popen_spawn_posix.Popen):
        """Tells the pid as soon as there is one.

        A child whose start fails half-way is thereby not forgotten, and the guardian knows a child before the child has
        received what it is to run: if the parent dies in between, the child reads end-of-file and leaves by itself.
        """

        def _launch(self, process_obj: Any) -> None:
            self._on_pid = process_obj.on_pid
            super()._launch(process_obj)  # type: ignore[misc]

        @property
        def pid(self) -> int:
            """The child's pid."""
            return self._pid

        @pid.setter
        def pid(self, pid: int) -> None:
            self._pid = pid
            self._on_pid(pid)
