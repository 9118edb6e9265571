"""What becomes of the workers, and of what they started, when their parent is killed, interrupted, or simply ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.helpers import PATIENCE_S, is_running, running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
ROOT = Path(__file__).resolve().parents[2]


class Program:
    """One of ``parents``' programs, running."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.parents", name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.facts: dict[str, Any] = {"workers": [], "below": []}
        self.errors = ""

    def hear(self, key: str) -> Any:
        """Read until the program has told ``key``."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, f"the program ended without telling {key}: {self.end()} {self.errors}"
            facts = json.loads(line)
            self.facts["workers"] += facts.pop("workers", [])
            self.facts.update(facts)
            if key in facts:
                return facts[key]

    def end(self) -> int:
        """Wait for its end; return the exit code."""
        out, self.errors = self.process.communicate(timeout=PATIENCE_S)
        for line in out.splitlines():
            self.facts.update(json.loads(line))
        return self.process.returncode

    @property
    def all_pids(self) -> list[int]:
        """Every process that must be gone after it."""
        guardian = self.facts.get("guardian")
        return [*self.facts["workers"], *self.facts["below"], *([guardian] if guardian else [])]


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    running_program = Program(request.param)
    yield running_program
    if running_program.process.poll() is None:
        running_program.process.kill()
    running_program.process.communicate(timeout=PATIENCE_S)


def using(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("program", [name], indirect=True)


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["parent only", "its process group"])
@using("lives")
def test_parent_killed_leaves_no_child_and_no_grandchild(program: Program, kill: Callable[[int, int], None]) -> None:
    program.hear("guardian")
    assert len(program.facts["below"]) == 6, "each of two workers started three, one of them in a session of its own"
    assert sorted(running(program.all_pids)) == sorted(program.all_pids)
    kill(program.process.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    until(lambda: not running(program.all_pids), "the end of all that the parent started")
    # A bound of the contract, not a measurement; a test machine under load gets a margin.
    assert time.monotonic() - killed_at < 2.0 + 3.0


@using("stuck_child")
def test_parent_killed_while_a_worker_holds_its_gil_for_ever(program: Program) -> None:
    program.hear("guardian")
    program.hear("stuck")
    program.process.kill()
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@using("stuck_child")
def test_parent_and_guardian_killed_together_leave_no_worker(program: Program) -> None:
    guardian = program.hear("guardian")
    program.hear("stuck")
    os.kill(guardian, signal.SIGKILL)
    program.process.kill()
    until(lambda: not running(program.facts["workers"]), "the workers' end by the parent-death signal alone")


@using("forgetful")
def test_a_worker_without_parent_death_signal_sees_the_end_of_file(program: Program) -> None:
    guardian = program.hear("guardian")
    os.kill(guardian, signal.SIGKILL)
    program.process.kill()
    in_session = program.facts["below"].pop(1)
    until(lambda: not running(program.all_pids), "the worker's end, and its group's, by end-of-file alone")
    os.kill(in_session, signal.SIGKILL)  # nobody was left to do it


@using("young")
def test_an_interrupt_from_the_terminal_does_not_reach_workers_being_born(program: Program) -> None:
    program.hear("ready")
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.end() == 130
    assert program.facts["failures"] == []
    assert program.errors == ""


@using("guardian_dies")
def test_a_lost_guardian_is_replaced_and_knows_the_earlier_workers(program: Program) -> None:
    first = program.hear("below") and program.facts["guardian"]
    second = program.hear("guardian")
    assert first != second
    program.process.kill()
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@using("leaves")
def test_interpreter_that_ends_ends_its_workers(program: Program) -> None:
    program.hear("guardian")
    assert program.end() == 0
    assert program.errors == ""
    # Killed at the latest by the parent's end; a killed process may need a moment more than its parent to be gone.
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@using("raises")
def test_exception_in_the_parent_ends_its_workers(program: Program) -> None:
    program.hear("guardian")
    assert program.end() == 1
    assert "planted in the parent" in program.errors
    # Killed at the latest by the parent's end; a killed process may need a moment more than its parent to be gone.
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@pytest.mark.parametrize("whole_group", [False, True], ids=["parent only", "whole group as by a terminal"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@using("signals")
def test_first_signal_is_graceful(program: Program, number: signal.Signals, code: int, whole_group: bool) -> None:
    program.hear("ready")
    (os.killpg if whole_group else os.kill)(program.process.pid, number)
    assert program.end() == code
    assert program.facts["requested"] == number.name
    assert program.facts["failures"] == []
    assert program.errors == ""
    # Killed at the latest by the parent's end; a killed process may need a moment more than its parent to be gone.
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
@using("deaf")
def test_second_signal_kills(program: Program, number: signal.Signals, code: int) -> None:
    program.hear("ready")
    os.kill(program.process.pid, number)
    program.hear("requested")
    assert running(program.facts["workers"]) == program.facts["workers"]
    os.kill(program.process.pid, number)
    # A Python that ends by KeyboardInterrupt ends by the signal itself, which a shell reports as 130.
    assert program.end() == code
    assert f"second {number.name}: killing the workers" in program.errors
    # Killed at the latest by the parent's end; a killed process may need a moment more than its parent to be gone.
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@using("thread")
def test_in_a_thread_that_is_not_the_main_one_signals_stay_with_the_main_one(program: Program) -> None:
    assert program.hear("guardian")
    assert program.end() == 0
    # Killed at the latest by the parent's end; a killed process may need a moment more than its parent to be gone.
    until(lambda: not running(program.all_pids), "the end of all that the parent started")


@using("lives")
def test_interrupt_in_the_middle_of_a_start_leaves_nothing(program: Program) -> None:
    # The whole group, so that whatever has been born and has no group of its own yet gets it too.
    until(lambda: len(_descendants(program.process.pid)) >= 2, "the first children")
    pids = _descendants(program.process.pid)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.end() == -2
    until(lambda: not running(pids), "the end of all that was started")


def _descendants(pid: int) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        below = [
            int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [child for child in below if is_running(child)]
