"""Hanging is seen by heartbeat, shown with its stack, and ends the worker; waiting on purpose is no hang."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from numa_collectors.errors import WorkerStartTimeoutError
from numa_collectors.worker import WorkerGroup, WorkerState
from numa_collectors.worker._monitor import _Stopwatch
from tests.worker.helpers import first_event, first_failure, is_running, until
from tests.worker.workers import BadImport, Busy, Misbehaving, Saving, Waiting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


@pytest.mark.parametrize("deed", ["stuck", "stuck holding the GIL"])
def test_stuck_in_a_c_call(deed: str) -> None:
    with WorkerGroup([Misbehaving("step", deed)], hang_timeout_s=0.3) as group:
        group.start()
        (worker,) = group.workers
        first_event(worker)
        assert "stuck_in_c" in (worker.stack_dump() or ""), "a stack can be had at any time, and does no harm"
        failure = first_failure(group)
        assert failure.kind == "hung"
        assert "stuck_in_c" in (failure.stack or "")
        assert (failure.last_heartbeat_age_s or 0) >= 0.3
        assert worker.state is WorkerState.FAILED
        assert worker.pid is not None
        assert not is_running(worker.pid)


@pytest.mark.parametrize("kind", [Busy, Waiting])
def test_stopped_process(kind: type[Busy] | type[Waiting]) -> None:
    # One is stopped in the middle of its steps, the other in a wait, which is an excuse only for those who can wake.
    with WorkerGroup([kind()], hang_timeout_s=0.3) as group:
        group.start()
        (worker,) = group.workers
        first_event(worker)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        failure = first_failure(group)
        assert failure.kind == "hung"
        assert "is stopped (SIGSTOP" in str(failure)
        assert failure.stack is None


def test_waiting_on_purpose_is_no_hang_and_neither_is_a_busy_step() -> None:
    with WorkerGroup([Waiting(rank=0), Busy(rank=1)], hang_timeout_s=0.2) as group:
        group.start()
        for worker in group.workers:
            first_event(worker)
        until_time = time.monotonic() + 0.8
        while time.monotonic() < until_time:
            assert group.poll() == []
            group.wait(0.02)


def test_long_work_has_a_limit_of_its_own() -> None:
    with WorkerGroup([Saving(1.0, rank=0), Saving(None, rank=1)], hang_timeout_s=0.3) as group:
        group.start()
        for worker in group.workers:
            first_event(worker)
        failure = first_failure(group)
        assert (failure.rank, failure.kind) == (0, "hung")
        assert "at most 1 s" in str(failure)
        assert "in step" in (failure.stack or "")
        assert (failure.last_heartbeat_age_s or 0) >= 1.0
        assert group.workers[1].state is WorkerState.RUNNING


def test_setup_that_takes_too_long() -> None:
    with WorkerGroup([Misbehaving("setup", "stuck")], start_timeout_s=1.0, hang_timeout_s=0.1) as group:
        group.start()
        failure = first_failure(group)
        assert failure.kind == "start-timeout"
        assert "had not returned after 1 s" in str(failure)


def test_worker_that_does_not_come_to_its_end() -> None:
    with WorkerGroup([Misbehaving("teardown", "leave a thread")], hang_timeout_s=0.3) as group:
        group.start()
        failure = first_failure(group)
        assert (failure.kind, failure.phase, failure.finished) == ("hung", "exit", True)
        assert "its work was done" in str(failure)


@pytest.mark.parametrize("phase", ["import", "setup"])
def test_wait_ready_gives_up_with_the_stack(phase: str) -> None:
    worker = BadImport("stuck") if phase == "import" else Misbehaving("setup", "stuck")
    worker.start()
    until(lambda: worker.phase == phase, phase)
    if phase == "setup":
        first_event(worker)
    else:
        until(lambda: "stuck_in_c" in (worker.stack_dump() or ""), "the stuck import")
    with pytest.raises(WorkerStartTimeoutError, match=r"(?s)did not become ready in time.*stuck_in_c") as raised:
        worker.wait_ready(0.05)
    assert raised.value.failure == worker.failure
    assert worker.pid is not None
    assert not is_running(worker.pid)


def test_a_gap_in_the_looking_is_no_silence() -> None:
    watch = _Stopwatch(8.0)
    assert not watch.look(0.0, moved=False)
    # The host slept for an hour, or the looking process was stopped.
    assert not watch.look(3600.0, moved=False)
    assert watch.still_s == 2.0
    assert not watch.look(3601.0, moved=False)
    assert not watch.look(3602.0, moved=True)
    assert [watch.look(3602.0 + 2 * n, moved=False) for n in range(1, 5)] == [False, False, False, True]
