"""Programs that tests run as parents of workers and kill or interrupt: ``python -m tests.worker.parents NAME``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from numa_collectors.worker import PinnedWorker, StopSignals, WorkerGroup
from tests.worker.workers import Greedy, Idle, Misbehaving, Parent


def say(**facts: object) -> None:
    """Tell the test, one JSON object a line."""
    print(json.dumps(facts), flush=True)


def started(*workers: PinnedWorker) -> WorkerGroup:
    """Start workers and tell all their pids, those of their own children too, and that of the guardian."""
    group = WorkerGroup(workers, shutdown_timeout_s=20.0)
    group.start()
    group.wait_ready(60.0)
    pids = [worker.pid for worker in workers]
    below = [pid for worker in workers for event in worker.events() for pid in event.get("pids", ())]
    assert group._launcher is not None
    say(workers=pids, below=below, guardian=group._launcher.guardian.pid)
    return group


def lives() -> None:
    """Poll like a training loop, until killed."""
    group = started(Parent(rank=0), Parent(rank=1), Idle(rank=2))
    while True:
        group.poll()
        group.wait(0.1)


def stuck_child() -> None:
    """Have a worker whose Python never runs again, and poll until killed."""
    group = started(Idle(rank=0))
    stuck = Misbehaving("step", "stuck holding the GIL", rank=1)
    group.workers.append(stuck)
    group._start(stuck)
    while not stuck.events():
        group.wait(0.1)
    say(workers=[stuck.pid], stuck=True)
    while True:
        group.wait(0.1)


def leaves() -> None:
    """Reach the interpreter's end with workers that run."""
    started(Parent(rank=0), Idle(rank=1))


def forgetful() -> None:
    """Have workers that the kernel will not kill with their parent."""
    group = started(Parent(rank=0, forget_parent=True))
    while True:
        group.wait(0.1)


def young() -> None:
    """Be interrupted before the workers have come to their first line."""
    with StopSignals() as stop, WorkerGroup([Idle(rank=rank) for rank in range(3)]) as group:
        group.start()
        say(ready=True)
        while stop.requested is None:
            group.wait(0.1)
        say(failures=[str(failure) for failure in group.stop(60.0)])
    sys.exit(stop.exit_code)


def raises() -> None:
    """Fail inside the block."""
    with started(Parent(rank=0), Misbehaving("stop", "raise", rank=1)):
        raise RuntimeError("planted in the parent")


def signals() -> None:
    """Stop in good order at the first signal."""
    with StopSignals() as stop, started(Idle(rank=0), Idle(rank=1)) as group:
        assert stop.active
        say(ready=True)
        while stop.requested is None:
            assert group.poll() == [], "a Ctrl-C is the parent's alone"
            group.wait(0.1)
        say(requested=stop.requested, failures=[str(failure) for failure in group.stop()])
    sys.exit(stop.exit_code)


def deaf() -> None:
    """Take the first signal, then take for ever to stop."""
    with StopSignals() as stop, started(Misbehaving("step", "stuck", rank=0), Parent(rank=1)):
        say(ready=True)
        while stop.requested is None:
            time.sleep(0.01)
        say(requested=stop.requested)
        threading.Event().wait()


def thread() -> None:
    """Train in a thread that is not the main one."""
    codes: list[int] = []

    def train() -> None:
        with StopSignals() as stop, started(Idle(rank=0)) as group:
            assert not stop.active
            codes.append(stop.exit_code)
            assert group.stop() == []

    runner = threading.Thread(target=train)
    runner.start()
    runner.join()
    sys.exit(codes[0])


def greedy() -> None:
    """Have a worker that takes more memory than there is."""
    group = started(Greedy(rank=0), Idle(rank=1))
    while not (failures := group.poll()):
        group.wait(0.1)
    say(failures=[str(failure) for failure in failures], left=[str(failure) for failure in group.stop()])


def guardian_dies() -> None:
    """Lose the guardian, get another with the next start, then be killed."""
    import signal

    group = started(Parent(rank=0))
    assert group._launcher is not None
    guardian = group._launcher.guardian
    old = guardian.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    late = Idle(rank=1)
    group.workers.append(late)
    group._start(late)
    late.wait_ready(60.0)
    assert guardian.pid != old
    say(workers=[late.pid], guardian=guardian.pid)
    while True:
        group.wait(0.1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
