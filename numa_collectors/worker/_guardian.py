"""The parent's side of the guardian process (see ``_guardian_main``)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

__all__ = ["MARK_VARIABLE", "Guardian", "new_mark"]

MARK_VARIABLE = "NUMA_COLLECTORS_MARK"
_END_TIMEOUT_S = 5.0


class _Marks:
    """Names for the processes of one parent; a forked copy of the parent is another parent."""

    def __init__(self) -> None:
        self.pid = -1
        self.token = ""
        self.count = 0


_marks = _Marks()
_marks_lock = threading.Lock()


def _token() -> str:
    if _marks.pid != os.getpid():
        _marks.pid, _marks.token, _marks.count = os.getpid(), os.urandom(8).hex(), 0
    return _marks.token


def new_mark() -> str:
    """Return a mark that no other worker has: this process's token, a dot, a number."""
    with _marks_lock:
        token = _token()
        _marks.count += 1
        return f"{token}.{_marks.count}"


class Guardian:
    """Started before the first worker, ended after the last; restarted if somebody kills it.

    Its methods may be called from any thread.  On a platform without ``/proc`` only process groups are cleared up.
    """

    def __init__(self) -> None:
        # Re-entrant, since a second Ctrl-C clears up from within a signal handler.
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: set[int] = set()

    @property
    def pid(self) -> int | None:
        """The guardian's pid while it runs."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start it unless it runs; it inherits the calling thread's affinity."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end_process()
                self._process = _start_process()
                self._tell(b"".join(b"+%d\n" % pid for pid in self._groups))

    def watch(self, pid: int) -> None:
        """Have the process group of ``pid`` killed if this process dies."""
        with self._lock:
            self._groups.add(pid)
            self._tell_or_restart(b"+%d\n" % pid)

    def forget(self, pid: int, mark: str) -> None:
        """Take a worker that is dead (and not yet reaped) off the list; whatever else carries its mark is killed."""
        with self._lock:
            self._groups.discard(pid)
            self._tell_or_restart(b"-%d\nS%s\n" % (pid, mark.encode()))

    def close(self) -> None:
        """End it in good order, its last sweeps done, and reap it; a second call does nothing."""
        with self._lock:
            if self._process is None:
                return
            with contextlib.suppress(OSError):  # a dead guardian needs no order
                self._tell(b"Q\n")
            self._end_process()

    def _tell_or_restart(self, command: bytes) -> None:
        if self._process is None:
            return
        try:
            self._tell(command)
        except OSError:  # EPIPE: killed; EAGAIN: stopped for so long that the pipe is full
            self._process.kill()
            self._end_process()
            self._process = _start_process()
            self._tell(b"".join(b"+%d\n" % pid for pid in self._groups) + command)

    def _tell(self, command: bytes) -> None:
        if command and self._process is not None and self._process.stdin is not None:
            os.write(self._process.stdin.fileno(), command)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        import subprocess

        try:
            process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start_process() -> subprocess.Popen[bytes]:
    # Here, since a worker's process imports this module too and starts no guardian.
    import pkgutil
    import subprocess

    program = pkgutil.get_data("numa_collectors.worker", "_guardian_main.py")
    if program is None:
        raise FileNotFoundError("numa_collectors/worker/_guardian_main.py is missing: the installation is damaged")
    with _marks_lock:
        token = _token()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-E", "-c", program.decode(), str(os.getpid()), token],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,  # neither Ctrl-C nor a kill of the parent's group reaches it
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process
