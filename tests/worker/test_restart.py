"""A replacement is started beside the loop that asked for it, which neither waits for it nor loses what goes wrong there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from numa_collectors.binding import BindRequest
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker import Launcher, PinnedWorker, WorkerGroup, WorkerState
from tests.worker.helpers import PATIENCE_S, until
from tests.worker.workers import Idle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


@contextmanager
def _busy(launcher: Launcher) -> Iterator[threading.Event]:
    """Keep the launcher's thread at something else; starts that are asked for wait until the event is set."""
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait(PATIENCE_S)

    launcher.order_process(work, BindRequest(), "none")
    assert begun.wait(PATIENCE_S)
    try:
        yield over
    finally:
        over.set()


def _restart(group: WorkerGroup, worker: PinnedWorker) -> PinnedWorker:
    """Restart in another thread, so that a restart that waits for the launcher fails the test and does not hang it."""
    following: list[PinnedWorker] = []
    thread = threading.Thread(target=lambda: following.append(group.restart(worker)), daemon=True)
    thread.start()
    thread.join(PATIENCE_S / 4)
    assert following, "restart() waits for the start"
    return following[0]


def test_a_loop_goes_on_while_a_replacement_is_not_started_yet() -> None:
    with Launcher() as launcher, WorkerGroup([Idle(rank=rank, launcher=launcher) for rank in range(2)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        with _busy(launcher) as over:
            following = _restart(group, group.workers[0])
            for _ in range(100):
                assert group.poll() == []
                group.wait(0.0)
            assert (following.state, following.pid, following.exitcode) == (WorkerState.STARTING, None, None)
            assert group.workers[1].state is WorkerState.RUNNING
            over.set()
            following.wait_ready(PATIENCE_S)
        assert following.pid is not None
        assert following.generation == 1
        assert group.stop() == []


@pytest.mark.parametrize("kill", [False, True])
def test_a_replacement_that_is_no_longer_wanted_is_never_started(kill: bool) -> None:
    with Launcher() as launcher, WorkerGroup([Idle(launcher=launcher)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        with _busy(launcher) as over:
            following = _restart(group, group.workers[0])
            ending = threading.Thread(target=group.kill if kill else group.stop)
            ending.start()
            until(lambda: following.state is WorkerState.STOPPING, "the order to end")
            over.set()
            ending.join(PATIENCE_S)
        assert (following.state, following.pid) == (WorkerState.EXITED, None)
        assert group.poll() == []


class OneOfAKind(Idle):
    """Has a successor that cannot be sent to a process."""

    def successor(self) -> OneOfAKind:
        following = super().successor()
        following.lock = threading.Lock()
        return following


def test_what_prevents_a_replacement_is_raised_where_the_group_is_looked_after() -> None:
    with WorkerGroup([OneOfAKind(rank=0), Idle(rank=1)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        following = group.restart(group.workers[0])
        with pytest.raises(NumaCollectorsError, match="cannot be sent"):
            until(group.poll, "the error")
        with pytest.raises(NumaCollectorsError, match="cannot be sent"):
            following.wait_ready(PATIENCE_S)
        assert following.state is WorkerState.FAILED
