"""One socket pair a worker: messages up, end-of-file down.

Guarantees: no call blocks, except :meth:`WorkerEnd.flush` and that with a bound; a message arrives whole or not at all;
messages are taken in the order in which they were sent; of statistics the newest survives, of everything else all.
What was sent before a worker died is still read after its death.
Assumes: the parent pumps now and then.  Where it does not, statistics are replaced by newer ones and other messages
wait in the worker's memory, up to ``MAX_PENDING``.
Not covered: a message half of whose fragments were sent at the time of a kill is dropped.
"""

from __future__ import annotations

import collections
import errno
import pickle
import select
import socket
import sys
import threading
import time
from typing import Any

from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker._control import Control

__all__ = ["MAX_PENDING", "UNREADABLE", "ParentEnd", "WorkerEnd", "make_pair"]

MAX_PENDING = 10_000
_FRAGMENT_BYTES = 32 * 1024  # well under the smallest default of net.core.wmem_default, so one send is one message
_MAX_STATS_IN_FLIGHT = 2
_STATS = "stats"
UNREADABLE = "unreadable"
_LAST = b"\x01"
_MORE = b"\x00"
_FULL = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ENOBUFS)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return (parent's end, worker's end), both non-blocking and keeping message boundaries."""
    kind = socket.SOCK_DGRAM if sys.platform == "darwin" else socket.SOCK_SEQPACKET  # macOS has no AF_UNIX SEQPACKET
    parent, worker = socket.socketpair(socket.AF_UNIX, kind)
    parent.setblocking(False)
    worker.setblocking(False)
    return parent, worker


class WorkerEnd:
    """The sending side; every method may be called from any thread of the worker."""

    def __init__(self, sock: socket.socket, control: Control) -> None:
        self.sock = sock
        self._control = control
        self._lock = threading.Lock()
        self._fragments: collections.deque[bytes] = collections.deque()
        self._stats: object | None = None
        self._stats_sent = 0
        self._parent_gone = False

    @property
    def pending(self) -> bool:
        """Whether something still waits to be sent."""
        return self._stats is not None or bool(self._fragments)

    def send(self, kind: str, body: object) -> None:
        """Queue one message that must arrive, and send what the socket takes."""
        message = pickle.dumps((kind, body), protocol=5)
        with self._lock:
            if len(self._fragments) > MAX_PENDING:
                raise NumaCollectorsError(
                    f"{len(self._fragments)} message fragments wait for a parent that does not read them: send fewer "
                    "events, or call poll(), events() or stats in the parent more often"
                )
            self._queue(message)
            self._pump()

    def post_stats(self, stats: object) -> None:
        """Replace the statistics that wait, and send them if the parent has taken the earlier ones."""
        with self._lock:
            self._stats = stats
            self._pump()

    def pump(self) -> None:
        """Send what the socket takes now."""
        with self._lock:
            self._pump()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all is sent; False after ``timeout_s``, True also where the parent is gone."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.sock, select.POLLOUT)
        while True:
            self.pump()
            left_s = deadline - time.monotonic()
            if self._parent_gone or not self.pending:
                return True
            if left_s <= 0:
                return False
            # Statistics wait for the parent's acknowledgement, of which the socket tells nothing.
            poller.poll(min(left_s, 0.02) * 1000)

    def _queue(self, message: bytes) -> None:
        for start in range(0, len(message), _FRAGMENT_BYTES):
            end = start + _FRAGMENT_BYTES
            self._fragments.append((_LAST if end >= len(message) else _MORE) + message[start:end])

    def _pump(self) -> None:
        while not self._parent_gone:
            if not self._fragments and not self._take_stats():
                return
            try:
                self.sock.send(self._fragments[0])
            except OSError as error:
                if error.errno in _FULL:
                    return
                if error.errno not in _GONE:
                    raise
                self._parent_gone = True
                self._fragments.clear()
                return
            self._fragments.popleft()

    def _take_stats(self) -> bool:
        if self._stats is None or self._stats_sent - self._control.stats_taken >= _MAX_STATS_IN_FLIGHT:
            return False
        stats, self._stats = self._stats, None
        self._stats_sent += 1
        self._queue(pickle.dumps((_STATS, stats), protocol=5))
        return True


class ParentEnd:
    """The receiving side; its owner serialises the calls."""

    def __init__(self, sock: socket.socket, control: Control) -> None:
        self.sock = sock
        self._control = control
        self._parts: list[bytes] = []

    def drain(self) -> list[tuple[str, Any]]:
        """Take every message that has arrived; after a worker's death this yields all that it had sent."""
        messages: list[tuple[str, Any]] = []
        while True:
            try:
                fragment = self.sock.recv(_FRAGMENT_BYTES + 1)
            except BlockingIOError:
                return messages
            except ConnectionResetError:
                return messages
            if not fragment:
                return messages
            self._parts.append(fragment[1:])
            if fragment[:1] == _LAST:
                message = b"".join(self._parts)
                self._parts.clear()
                messages.append(self._decode(message))

    def _decode(self, message: bytes) -> tuple[str, Any]:
        try:
            # Only a process that this one started, from this one's own code, holds the other end.
            kind, body = pickle.loads(message)
        except Exception as error:  # noqa: BLE001 - whatever the classes in a user's message raise
            return UNREADABLE, f"{type(error).__name__}: {error}"
        if kind == _STATS:
            self._control.stats_taken += 1
        return kind, body

    def close(self) -> None:
        """Close the socket: a worker that still lives takes it for its parent's death."""
        self.sock.close()
