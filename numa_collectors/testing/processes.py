"""Child processes for tests: spawned, told when to die, never left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn

__all__ = ["CHILD_TIMEOUT_S", "Child", "child", "fail", "raises"]

CHILD_TIMEOUT_S = 60.0


def fail(message: str) -> NoReturn:
    """Fail the running test."""
    raise AssertionError(message)


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[None]:
    """Expect one of ``kinds``, without depending on a test framework."""
    try:
        yield
    except kinds:
        return
    fail(f"expected {' or '.join(kind.__name__ for kind in kinds)}, nothing was raised")


class Child:
    """A spawned process and a pipe to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """The next message, or failure when it dies or takes too long."""
        if not self.pipe.poll(CHILD_TIMEOUT_S):
            fail("the child process said nothing in time")
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join(CHILD_TIMEOUT_S)
            fail(f"the child process ended with exit code {self.process.exitcode} before it answered")

    def kill(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.join(CHILD_TIMEOUT_S)

    def join(self) -> None:
        """Wait for its orderly end."""
        self.process.join(CHILD_TIMEOUT_S)
        if self.process.exitcode != 0:
            fail(f"the child process ended with exit code {self.process.exitcode}")

    def close(self) -> None:
        """Kill it if it still runs, and give back what it took."""
        if self.process.is_alive():
            self.kill()
        self.process.join(CHILD_TIMEOUT_S)
        self.process.close()
        self.pipe.close()


@contextlib.contextmanager
def child(target: Callable[..., None], *args: Any) -> Iterator[Child]:
    """Run ``target(connection, *args)`` in a spawned process for the time of the block."""
    process = Child(target, *args)
    try:
        yield process
    finally:
        process.close()


def block_until_killed(pipe: Connection, message: object) -> NoReturn:
    """Tell the parent that the point is reached, and wait for SIGKILL."""
    pipe.send(message)
    threading.Event().wait(CHILD_TIMEOUT_S)
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("unreachable")
