"""Every end that was not asked for is a failure in words, in every phase, whatever the exit code."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

from numa_collectors.errors import BindingError, WorkerFailedError
from numa_collectors.worker import PinnedWorker, WorkerFailure, WorkerGroup, WorkerState, raise_failure
from numa_collectors.worker._failure import hint_for
from numa_collectors.worker._memory_events import OomKills
from tests.worker.helpers import PATIENCE_S, first_event, first_failure, until
from tests.worker.workers import BadImport, Idle, Misbehaving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")

DEEDS = {
    "raise": ("raised", 1, "ValueError: planted"),
    "exit 0": ("raised", 1, "never success"),
    "os._exit 0": ("left", 0, "an exit code is no success"),
    "os._exit 3": ("left", 3, "exit code 3"),
    "segfault": ("died", -signal.SIGSEGV, "SIGSEGV"),
    "bus error": ("died", -signal.SIGBUS, "a file that shrank while it was mapped"),
}


@pytest.mark.parametrize("phase", ["import", "setup", "step", "teardown"])
def test_each_deed_in_each_phase(phase: str) -> None:
    workers = _workers(phase, list(DEEDS))
    with WorkerGroup(workers) as group:
        group.start()
        for worker, (deed, (kind, exit_code, words)) in zip(workers, DEEDS.items(), strict=True):
            assert worker.join(PATIENCE_S), deed
            failure = worker.failure
            assert failure is not None, f"{deed} in {phase} was taken for success"
            assert worker.state is WorkerState.FAILED
            assert (failure.kind, failure.exit_code, failure.phase) == (kind, exit_code, phase), failure
            assert words in str(failure)
            assert failure.pid == worker.pid
            if kind == "raised":
                assert "Traceback" in (failure.traceback or "")
            if deed in ("segfault", "bus error"):
                assert "workers.py" in (failure.stack or ""), "the crash's stack"
        reported = group.poll()
        assert {failure.rank for failure in reported} == set(range(len(workers)))
        assert group.first_failure == reported[0]
        assert group.poll() == [], "each failure is reported once"


def _workers(phase: str, deeds: list[str]) -> list[PinnedWorker]:
    if phase == "import":
        return [BadImport(deed, rank=rank) for rank, deed in enumerate(deeds)]
    return [Misbehaving(phase, deed, rank=rank) for rank, deed in enumerate(deeds)]


def test_killed_in_each_phase_is_seen_and_said() -> None:
    workers = [BadImport("wait", rank=0)]
    workers += [Misbehaving(phase, "wait", rank=1 + rank) for rank, phase in enumerate(("setup", "step", "teardown"))]
    with WorkerGroup(workers) as group:
        group.start()
        for worker, phase in zip(workers, ("import", "setup", "step", "teardown"), strict=True):
            until(lambda worker=worker, phase=phase: worker.phase == phase, phase)
            if phase != "import":
                first_event(worker)
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
            failure = first_failure(group)
            assert (failure.rank, failure.kind, failure.phase) == (worker.rank, "died", phase)
            assert (failure.exit_code, failure.signal_name) == (-9, "SIGKILL")
            assert "killed by SIGKILL" in str(failure)
            assert "out-of-memory" in str(failure) or "out of memory" in str(failure)


def test_killed_before_the_librarys_first_line() -> None:
    with WorkerGroup([Idle()]) as group:
        group.start()
        (worker,) = group.workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        failure = first_failure(group)
        assert failure.kind == "died"
        with pytest.raises(WorkerFailedError, match="SIGKILL"):
            group.wait_ready(PATIENCE_S)


def test_signals_to_one_worker_alone_are_failures() -> None:
    with WorkerGroup([Idle(rank=0), Idle(rank=1), Idle(rank=2)]) as group:
        group.start()
        group.wait_ready(PATIENCE_S)
        for worker in group.workers:
            until(lambda worker=worker: worker.state is WorkerState.RUNNING, "running")
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGBUS)
        for worker, number in zip(group.workers, numbers, strict=True):
            assert worker.pid is not None
            os.kill(worker.pid, number)
            assert worker.join(PATIENCE_S)
        interrupted, terminated, bus = (worker.failure for worker in group.workers)
        assert interrupted is not None
        assert terminated is not None
        assert bus is not None
        assert (interrupted.kind, interrupted.message) == ("raised", "KeyboardInterrupt")
        assert (terminated.kind, terminated.signal_name) == ("died", "SIGTERM")
        assert "to this process alone" in str(terminated)
        assert bus.signal_name == "SIGBUS"
        assert "memory limit" in str(bus)


def test_binding_refused_in_the_worker_is_a_binding_error_with_its_code() -> None:
    worker = Misbehaving("setup", "refuse")
    worker.start()
    with pytest.raises(BindingError, match="planted") as raised:
        worker.wait_ready(PATIENCE_S)
    assert (raised.value.code, raised.value.errno) == ("policy-trimmed", 22)


def test_a_second_exception_in_teardown_does_not_hide_the_first() -> None:
    worker = FailingTwice()
    worker.start()
    assert worker.join(PATIENCE_S)
    assert worker.failure is not None
    assert (worker.failure.message, worker.failure.phase) == ("ValueError: first", "mine")
    assert "and then teardown() raised" in (worker.failure.traceback or "")
    assert "second" in (worker.failure.traceback or "")


class FailingTwice(PinnedWorker):
    """Fails in a phase with a name of its own, then once more."""

    def step(self) -> bool | None:
        self.set_phase("mine")
        raise ValueError("first")

    def teardown(self) -> None:
        raise ValueError("second")


def test_a_failure_travels_and_raises_what_belongs_to_it() -> None:
    failure = WorkerFailure("collector", 3, 2, "died", pid=7, exit_code=-11, signal_name="SIGSEGV", phase="step")
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert str(failure).startswith("collector[3] died, killed by SIGSEGV (generation 2, pid 7, phase step")
    with pytest.raises(WorkerFailedError) as raised:
        raise_failure(failure)
    assert raised.value.failure == failure
    with pytest.raises(BindingError) as refused:
        raise_failure(WorkerFailure("collector", 0, 0, "refused", message="no", code="affinity-trimmed", errno=22))
    assert (refused.value.code, refused.value.errno) == ("affinity-trimmed", 22)


V2 = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/memory.events": "low 0\nhigh 2\nmax 9\noom 1\noom_kill {}\n",
    "sys/fs/cgroup/job/memory.max": "268435456\n",
    "proc/vmstat": "nr_free_pages 1\noom_kill 0\n",
}
V1 = {
    "proc/self/cgroup": "5:cpu:/\n4:memory:/docker/abc\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
}
MACHINE = {"proc/vmstat": "nr_free_pages 1\noom_kill {}\n"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (V2, "memory limit of 256 MiB"),
        (V1, "memory limit (oom_kill rose)"),
        (MACHINE, "OOM killer acted on this machine"),
    ],
    ids=["cgroup v2", "cgroup v1 in a container", "whole machine"],
)
def test_the_kernels_counters_tell_an_out_of_memory_kill(tmp_path: Path, files: dict[str, str], words: str) -> None:
    def read(count: int) -> OomKills:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(count))
        return OomKills.read(str(tmp_path))

    before, unchanged, after = read(4), read(4), read(5)
    assert unchanged.explain_since(before) is None
    explanation = after.explain_since(before)
    assert explanation is not None
    assert words in explanation
    assert hint_for(-9, "step", explanation) == explanation


def test_no_counter_no_claim(tmp_path: Path) -> None:
    nothing = OomKills.read(str(tmp_path))
    assert nothing == OomKills(None, None, None)
    assert nothing.explain_since(nothing) is None
    assert "dmesg" in (hint_for(-9, "step", None) or "")
