"""A worker's life from both sides: start, messages, end, next generation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from numa_collectors.binding import BindRequest
from numa_collectors.errors import BindingError, NumaCollectorsError, WorkerFailedError
from numa_collectors.worker import PinnedWorker, WorkerGroup, WorkerState, render_name
from tests.worker.helpers import PATIENCE_S, children, first_event, is_running, until
from tests.worker.workers import BadImport, Chatty, Counting, Idle, Misbehaving, Nesting, Reporting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


def test_a_worker_runs_to_its_end_and_its_messages_arrive() -> None:
    worker = Counting(5, role="collector", rank=3)
    assert worker.name == "collector[3]" == render_name("collector", 3)
    assert worker.state is WorkerState.CREATED
    worker.start()
    worker.wait_ready(PATIENCE_S)
    assert worker.join(PATIENCE_S)
    assert worker.state is WorkerState.EXITED
    assert worker.failure is None
    assert worker.finished
    assert worker.exitcode == 0
    assert worker.result == {"count": 5, "pid": worker.pid}
    assert worker.stats == {"count": 5}, "the newest statistics survive, also the worker's end"
    assert worker.events() == [{"hello": "collector[3]", "generation": 0}]
    assert worker.events() == []
    assert worker.num_steps == 5


def test_ready_running_stopped() -> None:
    worker = Idle()
    worker.start()
    assert worker.state in (WorkerState.STARTING, WorkerState.READY, WorkerState.RUNNING)
    worker.wait_ready(PATIENCE_S)
    until(lambda: worker.state is WorkerState.RUNNING, "running")
    worker.request_stop()
    assert worker.state in (WorkerState.STOPPING, WorkerState.EXITED)
    assert worker.join(PATIENCE_S)
    assert (worker.state, worker.failure, worker.finished) == (WorkerState.EXITED, None, False)
    assert worker.join(0), "a second join returns at once"


def test_a_worker_is_started_once() -> None:
    worker = Counting(1)
    with pytest.raises(NumaCollectorsError, match="not been started"):
        worker.wait_ready(1)
    with pytest.raises(NumaCollectorsError, match="own process"):
        worker.heartbeat()
    worker.start()
    with pytest.raises(NumaCollectorsError, match="started before"):
        worker.start()
    assert worker.join(PATIENCE_S)


def test_messages_are_kept_for_a_parent_that_does_not_read() -> None:
    # 40 events of 10 kB and a result of 3 MB are more than the socket holds.
    worker = Chatty()
    worker.start()
    handle = worker._handle
    assert handle is not None
    until(lambda: handle.control.phase == "teardown", "the end of the chatter, to which nobody has listened")
    assert worker.join(PATIENCE_S)
    assert worker.failure is None
    events = worker.events()
    assert [event["number"] for event in events] == list(range(40))
    assert worker.result == b"r" * 3_000_000
    assert worker.stats == {"count": 1999}
    assert handle.num_messages < 60, "statistics are replaced by newer ones, not queued"


def test_class_that_cannot_travel_is_refused_before_any_process_starts() -> None:
    class Local(PinnedWorker):
        def step(self) -> bool | None:
            return True

    before = children()
    with pytest.raises(NumaCollectorsError, match=r"worker\[0\].*Local.*no process was started.*top of a module"):
        Local().start()
    worker = Counting(1)
    worker.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(NumaCollectorsError, match=r"cannot pickle '_thread.lock'.*setup\(\)"):
        worker.start()
    assert worker.state is WorkerState.CREATED
    assert children() - before <= _tracker(), "no process may be left"


def _tracker() -> set[int]:
    from multiprocessing import resource_tracker

    return {pid for pid in [resource_tracker._resource_tracker._pid] if pid}  # type: ignore[attr-defined]


def test_class_typed_into_a_session_is_refused_with_the_remedy() -> None:
    program = """
from numa_collectors.worker import PinnedWorker
class Typed(PinnedWorker):
    def step(self):
        return True
try:
    Typed().start()
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.startswith("NumaCollectorsError worker[0]")
    assert "move it into a module" in done.stdout
    assert done.stderr == ""


def test_a_group_whose_start_fails_leaves_none_of_its_members() -> None:
    bad = Counting(1, rank=1)
    bad.lock = threading.Lock()  # type: ignore[attr-defined]
    good = Idle(rank=0)
    group = WorkerGroup([good, bad])
    with pytest.raises(NumaCollectorsError, match="cannot be sent"):
        group.start()
    assert good.state is WorkerState.EXITED
    assert group.stop() == []


def test_names_of_a_group_differ() -> None:
    with pytest.raises(NumaCollectorsError, match="different names"):
        WorkerGroup([Idle(rank=1), Idle(rank=1)])


def test_module_that_cannot_be_imported_is_a_failure_with_a_traceback() -> None:
    worker = BadImport("raise")
    worker.start()
    with pytest.raises(
        WorkerFailedError, match=r"(?s)ValueError: planted.*phase import.*Traceback.*in __call__|planted"
    ):
        worker.wait_ready(PATIENCE_S)
    assert worker.failure is not None
    assert (worker.failure.kind, worker.failure.phase) == ("raised", "import")
    assert "planted" in (worker.failure.traceback or "")


def test_exception_in_setup_before_the_parent_waits() -> None:
    worker = Misbehaving("setup", "raise")
    worker.start()
    assert worker.join(PATIENCE_S)
    with pytest.raises(WorkerFailedError, match=r"(?s)ValueError: planted.*phase setup.*Traceback"):
        worker.wait_ready(0.0)


def test_the_caller_stays_as_it_was_and_the_worker_is_bound_before_its_code_runs() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    environment = dict(os.environ)
    request = BindRequest(cpus=(cpus[-1],), memory_nodes=(0,), num_threads=1, mode="require")
    worker = Reporting(bind=request)
    try:
        worker.start()
        report = worker.wait_ready(PATIENCE_S)
    except BindingError as error:
        pytest.skip(f"this machine refuses: {error.code}")
    assert report.verified
    assert worker.bind_report == report
    assert os.sched_getaffinity(0) == set(cpus)
    assert {name: os.environ[name] for name in environment} == environment
    assert set(os.environ) - set(environment) <= {"NUMA_COLLECTORS_BINDING_WARNED"}
    assert first_event(worker) == {"affinity": [cpus[-1]], "threads": os.environ.get("OMP_NUM_THREADS", "1")}
    assert worker.recheck(PATIENCE_S) == ()
    worker.request_stop()
    assert worker.join(PATIENCE_S)


def test_a_worker_that_unbinds_itself_is_found_out() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    worker = Reporting(bind=BindRequest(cpus=(cpus[0],)), stray_to=cpus[1])
    worker.start()
    worker.wait_ready(PATIENCE_S)
    until(lambda: worker.num_steps, "the step that leaves the place")
    drift = worker.recheck(PATIENCE_S)
    assert "affinity" in {change.kind for change in drift}
    assert drift == worker.drift
    worker.kill()
    assert worker.join(PATIENCE_S)
    with pytest.raises(WorkerFailedError, match="has ended"):
        worker.recheck()


def test_a_binding_that_cannot_be_had_is_refused_with_its_code_and_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    worker = Idle(bind=BindRequest(cpus=(100_000,), mode="require"))
    with pytest.raises(BindingError) as raised:
        worker.start()
    assert raised.value.code == "cpu-missing"
    assert os.sched_getaffinity(0) == before
    # The same launcher goes on: one refusal must not leave its thread bound to anything.
    good = Reporting()
    good.start()
    good.wait_ready(PATIENCE_S)
    assert first_event(good)["affinity"] == sorted(before)
    good.kill()
    assert good.join(PATIENCE_S)


def test_attributes_may_be_set_before_and_after_the_base_class() -> None:
    worker = Counting(2)
    state: dict[str, Any] = worker.__getstate__()
    assert (state["num"], state["count"]) == (2, 0)
    assert not {"_handle", "_services", "launcher"} & set(state), "the parent's side does not travel"


def test_exit_handlers_run_and_what_the_worker_started_itself_ends_with_it(tmp_path: Path) -> None:
    worker = Nesting(str(tmp_path / "left"))
    worker.start()
    inner = first_event(worker)["inner"]
    assert isinstance(inner, int)
    assert worker.join(PATIENCE_S)
    assert worker.failure is None
    assert (tmp_path / "left").read_text() == "in good order"
    assert not is_running(inner)


def test_next_generation() -> None:
    with WorkerGroup([Counting(2, role="collector", rank=1), Idle(rank=0)]) as group:
        group.start()
        first = group.workers[0]
        group.wait_ready(PATIENCE_S)
        assert first.join(PATIENCE_S)
        second = group.restart(first)
        assert group.workers[0] is second
        assert (second.generation, second.name) == (1, "collector[1]")
        assert first_event(second) == {"hello": "collector[1]", "generation": 1}
        assert second.join(PATIENCE_S)
        assert second.pid != first.pid
        third = group.restart(group.workers[1])
        assert third.generation == 1
        assert group.poll() == [], "a replaced worker is no failure"
    assert third.state is WorkerState.EXITED
