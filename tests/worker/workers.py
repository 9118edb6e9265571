"""Worker classes for the tests: light, importable by a spawned child."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numa_collectors.errors import BindingError
from numa_collectors.worker import PinnedWorker

# A read of an empty pipe is restarted after a signal handler (SA_RESTART), unlike a sleep: stuck for good.
_READ = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)


def stuck_in_c(*, holding_gil: bool) -> None:
    """Block for ever in a C call."""
    library = (ctypes.PyDLL if holding_gil else ctypes.CDLL)(None)
    library.read.argtypes = _READ
    descriptor, _ = os.pipe()
    library.read(descriptor, ctypes.create_string_buffer(1), 1)


class Idle(PinnedWorker):
    """Waits to be stopped."""

    def step(self) -> bool | None:
        with self.waiting():
            time.sleep(0.01)
        return None


class Counting(PinnedWorker):
    """Takes a number of steps, then is done; results, statistics and events on the way."""

    def __init__(self, num: int, **options: Any) -> None:
        self.num = num
        super().__init__(**options)
        self.count = 0

    def setup(self) -> None:
        self.send_event({"hello": self.name, "generation": self.generation})

    def step(self) -> bool | None:
        self.count += 1
        self.post_stats({"count": self.count})
        return self.count >= self.num

    def teardown(self) -> None:
        self.set_result({"count": self.count, "pid": os.getpid()})


class Misbehaving(PinnedWorker):
    """Does what it is told in the phase it is told."""

    def __init__(self, phase: str, what: str, **options: Any) -> None:
        super().__init__(**options)
        self.phase_of_it = phase
        self.what = what

    def setup(self) -> None:
        self._perhaps("setup")

    def step(self) -> bool | None:
        self._perhaps("step")
        return self.phase_of_it == "teardown"

    def teardown(self) -> None:
        self._perhaps("teardown")

    def _perhaps(self, phase: str) -> None:
        if phase == self.phase_of_it:
            self.send_event({"about to": self.what})
            misbehave(self.what)
        elif phase == "step" and self.phase_of_it == "stop":
            with self.waiting():
                time.sleep(0.002)


def _raise(error: BaseException) -> None:
    raise error


def _wait_deaf_to_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def _read_a_page_that_is_gone() -> None:
    file = os.memfd_create("shrinks")
    os.ftruncate(file, mmap.PAGESIZE)
    with mmap.mmap(file, mmap.PAGESIZE) as memory:
        os.ftruncate(file, 0)
        print(memory[0])


_DEEDS: dict[str, Callable[[], object]] = {
    "raise": lambda: _raise(ValueError("planted")),
    "refuse": lambda: _raise(BindingError("planted", code="policy-trimmed", errno=22)),
    "exit 0": lambda: sys.exit(0),
    "os._exit 0": lambda: os._exit(0),
    "os._exit 3": lambda: os._exit(3),
    "bus error": _read_a_page_that_is_gone,
    "segfault": lambda: ctypes.string_at(0),
    "leave a thread": lambda: threading.Thread(target=threading.Event().wait).start(),
    "wait": lambda: threading.Event().wait(),
    "wait, deaf to SIGTERM": _wait_deaf_to_sigterm,
    "stuck": lambda: stuck_in_c(holding_gil=False),
    "stuck holding the GIL": lambda: stuck_in_c(holding_gil=True),
}


def misbehave(what: str) -> None:
    """Do one bad thing."""
    _DEEDS[what]()


class BadImport(PinnedWorker):
    """Cannot be loaded in the child."""

    def __init__(self, what: str, **options: Any) -> None:
        super().__init__(**options)
        self.bomb = Bomb(what)

    def step(self) -> bool | None:
        return True


class Bomb:
    """Misbehaves while it is being unpickled, as an import of a user's module may."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return (misbehave, (self.what,))


class Parent(PinnedWorker):
    """Starts processes of its own; may have lost the signal that comes with its parent's death."""

    def __init__(self, *, forget_parent: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.forget_parent = forget_parent

    def setup(self) -> None:
        if self.forget_parent:
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # PR_SET_PDEATHSIG: none, as a change of credentials does
        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        # One without the mark in its environment, one without the worker's process group, one forked.
        self.children = [subprocess.Popen(command, env={}), subprocess.Popen(command, start_new_session=True)]
        forked = os.fork()
        if forked == 0:
            time.sleep(600)
            os._exit(0)
        self.send_event({"pids": [*(child.pid for child in self.children), forked]})

    def step(self) -> bool | None:
        with self.waiting():
            time.sleep(0.002)
        return None


class Chatty(PinnedWorker):
    """Says more than a parent that does not listen can take at once."""

    def step(self) -> bool | None:
        for count in range(2000):
            self.post_stats({"count": count})
        for number in range(40):
            self.send_event({"number": number, "text": "x" * 10_000})
        return True

    def teardown(self) -> None:
        self.set_result(b"r" * 3_000_000)


class Reporting(PinnedWorker):
    """Says where it runs as its first act; may leave its place later."""

    def __init__(self, stray_to: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.stray_to = stray_to

    def setup(self) -> None:
        affinity = sorted(os.sched_getaffinity(0))
        self.send_event({"affinity": affinity, "threads": os.environ.get("OMP_NUM_THREADS")})

    def step(self) -> bool | None:
        if self.stray_to is not None:
            os.sched_setaffinity(0, {self.stray_to})
        with self.waiting():
            time.sleep(0.002)
        return None


class Busy(PinnedWorker):
    """One step that takes for ever and beats."""

    def step(self) -> bool | None:
        self.send_event({"in": "step"})
        while not self.should_stop:
            self.heartbeat()
            time.sleep(0.002)
        return None


class Waiting(PinnedWorker):
    """One step that waits on purpose until it is stopped."""

    def step(self) -> bool | None:
        with self.waiting():
            self.send_event({"in": "waiting"})
            while not self.should_stop:
                time.sleep(0.002)
        return None


class Nesting(PinnedWorker):
    """Starts a worker of its own, does not stop it, and has something to do at the interpreter's exit."""

    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path = path

    def setup(self) -> None:
        atexit.register(lambda: Path(self.path).write_text("in good order"))
        inner = Idle(rank=1)
        inner.start()
        inner.wait_ready(60.0)
        self.send_event({"inner": inner.pid})

    def step(self) -> bool | None:
        return True


class Greedy(PinnedWorker):
    """Takes memory until somebody ends it."""

    def step(self) -> bool | None:
        self.taken = [*getattr(self, "taken", []), bytearray(os.urandom(1)) * (8 << 20)]
        return None


class Saving(PinnedWorker):
    """Does long work that may take ``limit_s``, and does not come back from it."""

    def __init__(self, limit_s: float | None, **options: Any) -> None:
        super().__init__(**options)
        self.limit_s = limit_s

    def step(self) -> bool | None:
        with self.waiting(self.limit_s):
            self.send_event({"in": "long work"})
            threading.Event().wait()
        return None
