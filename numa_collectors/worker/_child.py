"""What runs in the worker's process: isolation, proof of the binding, then the user's code under watch."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

from numa_collectors import binding
from numa_collectors.errors import BindingError
from numa_collectors.worker._channel import WorkerEnd
from numa_collectors.worker._control import Control
from numa_collectors.worker._live import kill_all_workers
from numa_collectors.worker._spawn import Boot

if TYPE_CHECKING:
    from numa_collectors.worker._pinned import PinnedWorker

__all__ = ["STACK_SIGNAL", "Services", "run_worker"]

# A real-time signal, away from the first three (glibc's own) and from SIGUSR1 and SIGUSR2, which schedulers and users
# take.
STACK_SIGNAL: int = int(signal.SIGRTMIN) + 6 if hasattr(signal, "SIGRTMIN") else int(getattr(signal, "SIGUSR2", 0))

_PR_SET_PDEATHSIG = 1
_FLUSH_TIMEOUT_S = 30.0
_MAX_TRACEBACK_CHARS = 200_000
_LEFT_BY_EXIT = "sys.exit() in a worker is never success, whatever its code: step() returns True when all work is done"


class Services:
    """The child-side services behind ``PinnedWorker``'s methods."""

    def __init__(self, control: Control, channel: WorkerEnd, request: binding.BindRequest) -> None:
        self.control = control
        self.channel = channel
        self.request = request
        self.report: binding.BindReport | None = None
        self._rechecks_answered = 0

    def heartbeat(self) -> None:
        """Beat; send what had to wait; answer the parent's question about the binding."""
        self.control.heartbeat()
        if self.channel.pending:
            self.channel.pump()
        number = self.control.recheck_requested
        if number != self._rechecks_answered and self.report is not None:
            self._rechecks_answered = number
            self.channel.send("drift", (number, binding.recheck(self.request, self.report)))

    @contextlib.contextmanager
    def waiting(self, limit_s: float | None = None) -> Iterator[None]:
        """Excuse the lack of heartbeats; with ``limit_s``, for that long."""
        if self.channel.pending:
            self.channel.pump()
        outer_s = self.control.wait_limit_s
        self.control.wait_limit_s = limit_s
        self.control.add_waiting(1)
        try:
            yield
        finally:
            self.control.heartbeat()
            self.control.wait_limit_s = outer_s
            self.control.add_waiting(-1)


def run_worker(boot: Boot) -> None:
    """Run one worker to its end; raises ``SystemExit(1)`` if that end was not good."""
    control = Control(boot.control)
    sock = socket.socket(fileno=boot.channel.detach())
    _isolate(boot.name, sock)
    _offer_stacks(boot.stack.detach(), control)
    channel = WorkerEnd(sock, control)
    good = _Session(boot, Services(control, channel, boot.request)).run()
    control.add_waiting(1)
    flushed = channel.flush(_FLUSH_TIMEOUT_S)
    control.add_waiting(-1)
    if not flushed:
        print(f"{boot.name}: the parent did not take its last messages in {_FLUSH_TIMEOUT_S} s", file=sys.stderr)
    control.set_phase("exit")
    kill_all_workers()  # those that this worker started itself and did not stop
    sock.detach()  # the watching thread goes on until the process ends
    control.close()
    if not (good and flushed):
        raise SystemExit(1)


def _isolate(name: str, sock: socket.socket) -> None:
    """Lead an own process group, and die with the parent."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    # Born with SIGINT blocked: one that came while this process was in the parent's group was not meant for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A background group that writes to a terminal set to `tostop` would be stopped.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        with open("/proc/self/comm", "w") as file:
            file.write(name[:15])
    # After the parent-death signal is armed: a parent that died before it has closed its end already.
    threading.Thread(target=_watch_parent, args=(sock.fileno(), os.getppid()), name="numa-parent", daemon=True).start()


def _watch_parent(descriptor: int, parent_pid: int) -> None:
    """Kill this process's group when the parent's end of the channel closes."""
    poller = select.poll()
    poller.register(descriptor, 0)  # hang-up is always reported
    # Datagram sockets, macOS's substitute, do not report a hang-up: there the parent's pid is looked at.
    timeout_ms = None if sys.platform == "linux" else 500
    while not poller.poll(timeout_ms) and (timeout_ms is None or os.getppid() == parent_pid):
        continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _offer_stacks(descriptor: int, control: Control) -> None:
    """Have all stacks written to the parent's file on a crash and on the stack signal, whoever holds the GIL."""
    faulthandler.enable(file=descriptor, all_threads=True)
    if STACK_SIGNAL and hasattr(faulthandler, "register"):
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True, chain=False)
        control.set_stack_ready()


class _Session:
    """The phases of one worker: bind, import, setup, step, teardown."""

    def __init__(self, boot: Boot, services: Services) -> None:
        self._boot = boot
        self._services = services
        self._control = services.control
        self._channel = services.channel
        self._worker: PinnedWorker | None = None
        self._set_up = False

    def run(self) -> bool:
        """Run all phases; True if the work was done, or a stop was asked for, and teardown went well."""
        try:
            self._prove_binding()
            worker = self._load()
            self._control.set_phase("setup")
            worker.setup()
            self._set_up = True
            self._say_ready()
            finished = self._loop(worker)
            self._control.set_phase("teardown")
            self._set_up = False
            worker.teardown()
        except BaseException as error:  # noqa: BLE001 - everything that ends a worker is the parent's to know
            self._fail(error)
            return False
        self._channel.send("done", finished)
        return True

    def _prove_binding(self) -> None:
        self._control.set_phase("bind")
        report = binding.inspect(self._boot.request)
        self._services.report = report
        self._channel.send("bind_report", report)
        report.check()

    def _load(self) -> PinnedWorker:
        self._control.set_phase("import")
        with open(self._boot.payload.detach(), "rb") as file:
            worker: PinnedWorker = pickle.load(file)
        worker._services = self._services
        self._worker = worker
        return worker

    def _say_ready(self) -> None:
        assert self._services.report is not None
        # The user's imports may have changed masks: BLAS and OpenMP runtimes do.
        drift = binding.recheck(self._boot.request, self._services.report)
        self._control.set_phase("step")
        self._channel.send("ready", drift)

    def _loop(self, worker: PinnedWorker) -> bool:
        control, heartbeat = self._control, self._services.heartbeat
        try:
            while not control.stop_requested:
                heartbeat()
                finished = worker.step()
                control.count_step()
                if finished:
                    return True
        except SystemExit:
            if not control.stop_requested:
                raise
        return False

    def _fail(self, error: BaseException) -> None:
        record: dict[str, object] = {
            "phase": self._control.phase,
            "message": _one_line(error),
            "traceback": _text_of(error),
            "hint": _LEFT_BY_EXIT if isinstance(error, SystemExit) else None,
        }
        if isinstance(error, BindingError):
            record.update(code=error.code, errno=error.errno)
        self._channel.send("failed", record)
        if self._set_up and self._worker is not None:
            self._control.set_phase("teardown")
            try:
                self._worker.teardown()
            except BaseException as second:  # noqa: BLE001 - added to the record of the first
                self._channel.send("also", f"and then teardown() raised:\n{_text_of(second)}")


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    kind = type(error).__qualname__
    return f"{kind}: {text}" if text else kind


def _text_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    if len(text) > _MAX_TRACEBACK_CHARS:
        text = f"(shortened)\n{text[-_MAX_TRACEBACK_CHARS:]}"
    return text
