"""One deadline for all, whatever they are doing; twice, from anywhere; and nothing is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from numa_collectors.binding import BindRequest
from numa_collectors.worker import Launcher, PinnedWorker, WorkerGroup, WorkerState, kill_all_workers
from numa_collectors.worker._guardian_main import marks_of
from tests.worker.helpers import PATIENCE_S, children, first_event, is_running, running, until
from tests.worker.workers import Idle, Misbehaving, Parent, Waiting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


def test_stop_is_orderly_idempotent_and_takes_grandchildren_along() -> None:
    group = WorkerGroup([Parent(rank=0), Idle(rank=1)])
    group.start()
    group.wait_ready(PATIENCE_S)
    below = first_event(group.workers[0])["pids"]
    assert isinstance(below, list)
    assert running(below) == below
    assert group.stop() == []
    until(lambda: not running(below), "the end of all, also of the one that had a session of its own")
    assert [worker.state for worker in group.workers] == [WorkerState.EXITED] * 2
    assert group.stop() == []
    group.kill()
    assert [worker.state for worker in group.workers] == [WorkerState.EXITED] * 2


def test_a_worker_that_dies_takes_what_it_started_along() -> None:
    with WorkerGroup([Parent(rank=0), Idle(rank=1)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        worker = group.workers[0]
        below = first_event(worker)["pids"]
        assert isinstance(below, list)
        assert worker.pid is not None
        assert marks_of(worker.pid) == marks_of(below[1]) != marks_of(group.workers[1].pid or 0)
        os.kill(worker.pid, signal.SIGKILL)
        # The worker's end is seen although a forked grandchild still holds the other end of its pipes.
        assert [failure.rank for failure in until(group.poll, "the death")] == [0]
        until(lambda: not running(below), "the end of what it had started")
        assert group.workers[1].state is WorkerState.RUNNING


class _Stubborn:
    """Workers that do not end by themselves, each in its own way."""

    @staticmethod
    def make() -> list[PinnedWorker]:
        return [
            Misbehaving("step", "stuck", rank=0),
            Misbehaving("step", "stuck holding the GIL", rank=1),
            Misbehaving("teardown", "wait, deaf to SIGTERM", rank=2),
            Waiting(rank=3),
            Idle(rank=4),
        ]


def test_one_deadline_for_all_the_stubborn() -> None:
    workers = _Stubborn.make()
    with WorkerGroup(workers) as group:
        group.start()
        for worker in workers[:4]:
            first_event(worker)
        stopped = workers[3]
        assert stopped.pid is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        until(lambda: workers[4].state is WorkerState.RUNNING, "running")
        began = time.monotonic()
        failures = group.stop(1.0)
        # The bound is the library's promise (the deadline and the reaping), not a measurement.
        assert time.monotonic() - began < 1.0 + 2.0 + 3.0
        assert [(failure.rank, failure.kind) for failure in failures] == [(rank, "stop-timeout") for rank in range(4)]
        assert "stuck_in_c" in (failures[0].stack or "")
        assert "stuck_in_c" in (failures[1].stack or "")
        assert failures[2].phase == "teardown"
        assert [failure.signal_name for failure in failures] == ["SIGTERM", "SIGTERM", "SIGKILL", "SIGTERM"]
        assert workers[4].state is WorkerState.EXITED
        assert not running(worker.pid or 0 for worker in workers)


def test_a_failure_while_stopping_is_reported() -> None:
    with WorkerGroup([Misbehaving("stop", "raise", rank=0), Raising(rank=1)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        (failure,) = group.stop()
        assert (failure.rank, failure.kind, failure.phase) == (1, "raised", "teardown")
        assert group.first_failure == failure


class Raising(Idle):
    """Cannot end well."""

    def teardown(self) -> None:
        raise OSError("disk full")


def test_stop_from_another_thread_while_the_main_one_polls() -> None:
    with WorkerGroup([Idle(rank=0), Idle(rank=1)]) as group:
        group.start()
        results: list[object] = []
        stopper = threading.Thread(target=lambda: results.append(group.stop()))
        stopper.start()
        while stopper.is_alive():
            assert group.poll() == []
            group.wait(0.01)
        stopper.join()
        assert results == [[]]


def test_exception_in_the_block_passes_through_and_ends_all() -> None:
    group = WorkerGroup([Idle(rank=0)])
    with pytest.raises(ZeroDivisionError):
        _fail_within(group)
    assert group.workers[0].state is WorkerState.EXITED


def _fail_within(group: WorkerGroup) -> None:
    with group:
        group.start()
        raise ZeroDivisionError


def test_stop_before_start_and_without_workers() -> None:
    assert WorkerGroup([]).stop() == []
    group = WorkerGroup([Idle()])
    assert group.stop() == []
    assert group.poll() == []
    assert group.workers[0].state is WorkerState.CREATED


def test_stop_while_they_are_being_born() -> None:
    group = WorkerGroup([Idle(rank=rank) for rank in range(3)])
    group.start()
    assert group.stop(PATIENCE_S) == []
    assert [worker.state for worker in group.workers] == [WorkerState.EXITED] * 3


def test_everything_of_the_process_can_be_killed_at_once() -> None:
    alone, grouped = Idle(rank=0), Idle(rank=1)
    group = WorkerGroup([grouped])
    alone.start()
    group.start()
    kill_all_workers()
    assert alone.state is grouped.state is WorkerState.EXITED
    assert group.stop() == []


def test_the_launcher_and_its_guardian_end_with_the_last_worker() -> None:
    before = children()
    with Launcher() as launcher:
        mask = os.sched_getaffinity(0)
        worker = Idle(launcher=launcher, bind=BindRequest(cpus=(max(mask),)))
        worker.start()
        assert worker.pid is not None
        assert os.sched_getaffinity(worker.pid) == {max(mask)}
        assert os.sched_getaffinity(launcher.thread_id or 0) == mask, "what else it starts is not to be pinned"
        guardian = launcher.guardian.pid
        assert guardian is not None
        assert is_running(guardian)
        assert Path(f"/proc/{guardian}/stat").read_text().split()[5] == str(guardian), "a session of its own"
        worker.kill()
        assert worker.join(PATIENCE_S)
        assert is_running(guardian), "a launcher that was given belongs to its giver"
    assert not is_running(guardian)
    assert guardian not in children(), "and is no zombie"
    alone = Idle()
    alone.start()
    handle = alone._handle
    assert handle is not None
    guardian = handle._launcher.guardian.pid
    alone.kill()
    assert alone.join(PATIENCE_S)
    assert guardian not in children() - before
