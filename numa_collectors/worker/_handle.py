"""The parent's side of one worker process: its life, its messages, its end.

Every method may be called from any thread.  A process is recognised as dead without being reaped, so that its pid and
group cannot yet belong to anybody else while what remains of the group is killed; only then is it reaped.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from numa_collectors.binding import BindReport, Drift
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker._channel import UNREADABLE, ParentEnd, make_pair
from numa_collectors.worker._control import Control
from numa_collectors.worker._failure import FailureKind, WorkerFailure, hint_for, signal_name
from numa_collectors.worker._guardian import new_mark
from numa_collectors.worker._launcher import Job, shared_launcher
from numa_collectors.worker._live import live
from numa_collectors.worker._memory_events import OomKills
from numa_collectors.worker._spawn import WorkerProcess
from numa_collectors.worker._stacks import StackFile
from numa_collectors.worker._waiting import wait_any

if TYPE_CHECKING:
    from numa_collectors.worker._pinned import PinnedWorker

__all__ = ["Handle"]

# A worker that has reported its own exception gets this long for its teardown() and its exit.
_DYING_GRACE_S = 5.0


class Handle:
    """One process, from its start to its last message."""

    def __init__(self, worker: PinnedWorker) -> None:
        self.worker = worker
        self.lock = threading.RLock()
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.bind_report: BindReport | None = None
        self.drift: tuple[Drift, ...] = ()
        self.drift_number = 0
        self.num_messages = 0
        self.stats: Any = None
        self.events: collections.deque[Any] = collections.deque()
        self.result: Any = None
        self.ready = self.done = self.finished = False
        self.reaped = False
        self.reported = False
        self._collected = False
        self.stop_requested = self.kill_requested = False
        self.failure: WorkerFailure | None = None
        self.heartbeats = 0
        self._last_words = ("spawn", 0)  # phase and steps, kept when the page is gone
        self._news = select.poll()
        self._verdict: tuple[FailureKind, str | None, str | None] | None = None
        self._record: dict[str, Any] | None = None
        self._dying_since: float | None = None
        self._mark = new_mark()
        self._pidfd = -1
        self._order: Job | None = None
        self.start_error: BaseException | None = None
        self._oom_before = OomKills(None, None, None)
        self._owner_pid = os.getpid()
        with contextlib.ExitStack() as undo:
            self.control = Control.create(worker.name)
            undo.callback(self.control.close)
            self._socket, self._child_socket = make_pair()
            undo.callback(self._socket.close)
            undo.callback(self._child_socket.close)
            self.stacks = StackFile(worker.name)
            undo.pop_all()
        self._channel = ParentEnd(self._socket, self.control)
        self._process = WorkerProcess(
            worker, self.control.region, self._child_socket, self.stacks.descriptor, self._remember_pid
        )
        self._shares_launcher = worker.launcher is None
        self._launcher = worker.launcher or shared_launcher.acquire()

    # Birth.

    def start(self) -> None:
        """Start the process; on an exception nothing is left of it."""
        try:
            self._launcher.start_process(self._start_in_launcher, self.worker.bind, self._mark)
        except BaseException:
            self._give_up_start()
            self.join(5.0)
            raise

    def order_start(self) -> None:
        """Have a launcher that was given start the process; what prevents it becomes :attr:`start_error`.

        Neither this nor :meth:`check` waits for it.
        """
        try:
            self._order = self._launcher.order_process(self._start_in_launcher, self.worker.bind, self._mark)
        except BaseException:
            self._give_up_start()
            raise

    @property
    def starting(self) -> bool:
        """Whether a start was ordered and is not made yet."""
        order = self._order
        return order is not None and not order.done.is_set()

    def wait_started(self, timeout_s: float | None) -> bool:
        """Wait until an ordered start is made or has failed; False after ``timeout_s``."""
        order = self._order
        return order is None or order.done.wait(timeout_s)

    def _give_up_start(self) -> None:
        with self.lock:
            self.kill_requested = True  # a start that is still queued finds this and gives up
            self._signal_group(signal.SIGKILL)
            if self.pid is None:
                self.reaped = True  # there is nobody
                self._release()

    def _start_in_launcher(self) -> None:
        with self.lock:
            if self.kill_requested or self.stop_requested:
                raise NumaCollectorsError(f"{self.worker.name} was stopped before it was started")
            self._oom_before = OomKills.read()
            try:
                self._process.start()
            except BrokenPipeError:
                if self.pid is None:
                    raise
                # It died while it was being given its work: an exit like any other, seen by the next check().
            finally:
                self._process.release_payload()
                self._child_socket.close()
            live.add(self)

    def _remember_pid(self, pid: int) -> None:
        self.pid = pid
        self._launcher.guardian.watch(pid)
        if hasattr(os, "pidfd_open"):
            try:
                self._pidfd = os.pidfd_open(pid)
                self._news.register(self._pidfd, select.POLLIN)
                self._news.register(self._socket, select.POLLIN)
            except OSError:  # before Linux 5.3, or no descriptor left: the sentinel pipe serves, a little later
                self._pidfd = -1

    # Messages and death.

    def check(self) -> None:
        """Take the messages that have come, notice death, reap; never blocks."""
        if self.starting:
            return
        with self.lock:
            order, self._order = self._order, None
            if order is not None and order.error is not None:
                self.start_error = None if self.stop_requested or self.kill_requested else order.error
                self._give_up_start()
            if not self.alive:
                return
            self.heartbeats = self.control.heartbeats
            # One call for the common case, in which nothing has happened; without a pidfd death shows by asking only.
            if self._pidfd < 0 or self._news.poll(0):
                self._take_messages()
                if self._is_dead():
                    self._reap()
                    return
            if self._dying_since is not None and time.monotonic() - self._dying_since > _DYING_GRACE_S:
                self._signal_group(signal.SIGKILL)

    def _take_messages(self) -> None:
        for kind, body in self._channel.drain():
            self._take(kind, body)

    def _take(self, kind: str, body: Any) -> None:
        self.num_messages += 1
        if kind in ("stats", "result", "bind_report"):
            setattr(self, kind, body)
        elif kind == "event":
            self.events.append(body)
        elif kind == "ready":
            self.ready, self.drift = True, body
        elif kind == "drift":
            self.drift_number, self.drift = body
        elif kind == "done":
            self.done, self.finished = True, body
        elif kind == "failed":
            self._record, self._dying_since = body, time.monotonic()
        elif kind == "also" and self._record is not None:
            self._record["traceback"] += "\n" + body
        elif kind == UNREADABLE:
            self._record = {"phase": self.phase, "message": f"sent what its parent cannot unpickle ({body})"}
            self._signal_group(signal.SIGKILL)

    def _is_dead(self) -> bool:
        assert self.pid is not None
        if not hasattr(os, "waitid"):
            return self._process.exitcode is not None
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by somebody else in this process
            return True

    def _reap(self) -> None:
        assert self.pid is not None
        seen_at_ns = time.monotonic_ns()
        self._signal_group(signal.SIGKILL, leader=False)  # the zombie keeps the group's number from reuse
        self._launcher.guardian.forget(self.pid, self._mark)
        if not self._collected:  # an interrupt may have come between the lines below, and be followed by another check
            self.exit_code = self._collect_exit_code(self.pid)
            self._collected = True
        self._take_messages()
        self.heartbeats = self.control.heartbeats
        self._last_words = (self.control.phase, self.control.steps)
        last_ns = self.control.heartbeat_ns
        age_s = (seen_at_ns - last_ns) / 1e9 if last_ns else None
        self.failure = self._judge(age_s)
        self.reaped = True
        live.discard(self)
        self._release()

    def _collect_exit_code(self, pid: int) -> int | None:
        if self._process._popen is None:  # type: ignore[attr-defined]
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        code = self._process.exitcode
        if code is None:
            # SIGCHLD is ignored in this process, or somebody waited for all children: the status is lost.
            self._process._popen.returncode = 255  # type: ignore[attr-defined]
        return code

    def _judge(self, age_s: float | None) -> WorkerFailure | None:
        """Decide how the worker ended.  Only its own word counts as success, never an exit code."""
        code = self.exit_code
        kind, hint, stack = self._verdict or (None, None, None)
        record = self._record or {}
        if kind is None:
            if self._record is not None:
                kind, hint = "refused" if "code" in record else "raised", record.get("hint")
            elif self.kill_requested or (self.done and code == 0):
                return None
            else:
                kind = "died" if code is None or code < 0 or self.done else "left"
                out_of_memory = OomKills.read().explain_since(self._oom_before)
                hint = hint_for(code, self.phase, out_of_memory)
                stack = self.stacks.read_new()
        return WorkerFailure(
            role=self.worker.role,
            rank=self.worker.rank,
            generation=self.worker.generation,
            kind=kind,
            pid=self.pid,
            exit_code=code,
            signal_name=signal_name(code),
            phase=record.get("phase", self.phase),
            last_heartbeat_age_s=age_s,
            traceback=record.get("traceback"),
            stack=stack,
            hint=hint,
            message=record.get("message"),
            num_steps=self.num_steps,
            finished=self.done,
            code=record.get("code"),
            errno=record.get("errno"),
        )

    def _release(self) -> None:
        """Close every descriptor, each once; what was learned stays."""
        self._process.release_payload()
        if self._collected and self._process._popen is not None:  # type: ignore[attr-defined]
            self._process.join()
            self._process.close()
        self._child_socket.close()
        self._channel.close()
        self.stacks.close()
        self.control.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        shares, self._shares_launcher = self._shares_launcher, False
        if shares:
            shared_launcher.release(self._launcher)

    # Orders.

    @property
    def alive(self) -> bool:
        """Whether there is a process that has not been reaped; in a fork of the parent there is none."""
        return self.pid is not None and not self.reaped and self._owner_pid == os.getpid()

    @property
    def phase(self) -> str:
        """What the worker is doing, or was doing last."""
        with self.lock:
            return self.control.phase if self.alive else self._last_words[0]

    @property
    def num_steps(self) -> int:
        """How many calls of ``step()`` have returned."""
        with self.lock:
            return self.control.steps if self.alive else self._last_words[1]

    @property
    def excused(self) -> bool:
        """Whether a lack of heartbeats means nothing now."""
        return self._may_be_silent or self.control.waiting

    @property
    def waiting_only(self) -> bool:
        """Whether :attr:`excused` rests on the worker's wait alone."""
        return self.control.waiting and not self._may_be_silent

    @property
    def wait_limit_s(self) -> float | None:
        """The limit of the worker's wait of now; None without one, and where silence means nothing anyway."""
        return self.control.wait_limit_s if self.waiting_only else None

    @property
    def _may_be_silent(self) -> bool:
        return not self.ready or self.stop_requested or self._dying_since is not None

    def request_stop(self) -> None:
        """Set the stop flag."""
        with self.lock:
            self.stop_requested = True
            if self.alive:
                self.control.request_stop()

    def kill(self) -> None:
        """SIGKILL to the worker's process group; no failure is recorded for it."""
        with self.lock:
            self.kill_requested = True
            self._signal_group(signal.SIGKILL)

    def condemn(self, kind: FailureKind, hint: str | None, stack: str | None) -> None:
        """Record why, once; the first verdict stands."""
        with self.lock:
            if self._verdict is None and not self.reaped:
                self._verdict = (kind, hint, stack)

    def terminate(self) -> None:
        """SIGTERM to the group, and SIGCONT so that a stopped process gets it."""
        with self.lock:
            self._signal_group(signal.SIGTERM)
            self._signal_group(signal.SIGCONT)

    def force(self) -> None:
        """SIGKILL to the group, on a verdict that has been recorded."""
        with self.lock:
            self._signal_group(signal.SIGKILL)

    def ask_for_stack(self) -> bool:
        """Send the stack signal where it has a handler; False where no answer can come."""
        with self.lock:
            return self.alive and self.pid is not None and self.stacks.ask(self.pid, self.control.stack_ready)

    def stack_answered(self) -> bool:
        """Whether the answer to :meth:`ask_for_stack` is whole, or will not come."""
        with self.lock:
            return self.reaped or self.stacks.answered(time.monotonic())

    def _signal_group(self, number: int, *, leader: bool = True) -> None:
        if self.pid is None or not self.alive:
            return
        # The leader by itself too: it may not have made its group yet.
        for send in (os.killpg, os.kill) if leader else (os.killpg,):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)

    # Waiting.

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the end, taking messages meanwhile; False after ``timeout_s``."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.wait_started(timeout_s):
            self.check()
            if not self.alive:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            wait_any([self], None if deadline is None else deadline - time.monotonic())
        return False

    def descriptors(self) -> tuple[int, ...]:
        """Return what becomes readable when there is something to check; empty once reaped, and before the start."""
        if self.starting:
            return ()
        with self.lock:
            if not self.alive:
                return ()
            # The sentinel is a pipe whose other end a forked grandchild may hold; a pidfd reports the process itself.
            end = self._pidfd if self._pidfd >= 0 else self._process.sentinel
            return (self._socket.fileno(), end)
