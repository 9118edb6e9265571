"""Disturbances of a run, and the stage on which they are replayed: ``python -m tests.trainer.disturbances``.

The stage imports what a training program imports, once, and forks one program a row; the program is the command
``python -m numa_collectors.train`` with a session, an output and an environment of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
# For a test machine under load; the bounds themselves are the contract's.
PATIENCE_S = 60.0
HANG_TIMEOUT_S = 4.0
SHUTDOWN_TIMEOUT_S = 4.0
START_TIMEOUT_S = 30.0


_CAUSES = ("failed:", "error:", "second ")
_ENDS = ("did not stop in time", " died, ", "ending in an orderly way")


@dataclass(frozen=True)
class Row:
    """One disturbance and how the run has to end.

    ``plant`` is ``(role, rank, phase, what)``, see ``planting``; ``signals`` go to a process or to the parent's group
    once the planted moment has come.  ``helpers``: collectors start processes of their own.  ``program`` is what runs
    the trainer, see ``PROGRAMS``.  ``checkpoints`` is what must be there afterwards: "none", "last" (one made before the
    disturbance), "final" (one of the counts in the outcome), or "any": whatever is there is no further than the
    outcome.  ``bound_s`` is from the moment (without one: from the start) to the parent's end.
    """

    name: str
    plant: tuple[str, int, str, str] | None
    code: int
    words: str
    status: str | None = "failed"
    signals: tuple[tuple[signal.Signals, str], ...] = ()
    checkpoints: str = "any"
    bound_s: float = SHUTDOWN_TIMEOUT_S + 3.0
    helpers: bool = False
    program: str = "command"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def endless(self) -> bool:
        """Whether the run only ends by the disturbance."""
        return bool(self.signals)


@dataclass(frozen=True)
class Outcome:
    """What one replay left: exit code, output, seconds since the moment, processes that are still there."""

    code: int
    output: str
    seconds: float
    left: list[int]
    run_dir: Path

    @property
    def cause(self) -> str:
        """The line with which the run's end is explained to its user."""
        lines = [line for line in self.output.splitlines() if line.startswith(_CAUSES)]
        lines += [line for line in self.output.splitlines() if any(word in line for word in _ENDS)]
        return lines[0] if lines else ""

    @property
    def result(self) -> dict[str, Any] | None:
        """The run's own account of its end."""
        file = self.run_dir / "result.json"
        return json.loads(file.read_text()) if file.exists() else None


class Stage:
    """The test's side of the stage; any number of threads may :meth:`replay` at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.disturbances"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._changed = threading.Condition()
        self._pids: dict[str, int] = {}
        self._codes: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            with self._changed:
                self._pids.update(news.get("started", {}))
                self._codes.update({int(pid): code for pid, code in news.get("ended", {}).items()})
                self._changed.notify_all()

    def close(self) -> None:
        """End the stage."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _start(self, folder: Path, program: str, config: Path, environment: dict[str, str]) -> int:
        order = json.dumps(
            {"folder": str(folder), "program": program, "config": str(config), "environment": environment}
        )
        assert self._process.stdin is not None
        with self._changed:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
            assert self._changed.wait_for(lambda: str(folder) in self._pids, PATIENCE_S), "the stage does not answer"
            return self._pids[str(folder)]

    def _end(self, pid: int, timeout_s: float) -> int:
        with self._changed:
            ended = self._changed.wait_for(lambda: pid in self._codes, timeout_s)
            assert ended, f"the run had not ended {timeout_s:g} s after the disturbance"
            return self._codes[pid]

    def replay(self, row: Row, folder: Path) -> Outcome:
        """Run the program, disturb it, and wait until all of it is gone."""
        folder.mkdir()
        planted = dict(zip(("role", "rank", "phase", "what"), row.plant or (None, None, None, ""), strict=True))
        environment = {"DISTURBANCE": json.dumps({"folder": str(folder), "helpers": row.helpers, **planted})}
        file = folder / "config.json"
        file.write_text(json.dumps(_config(row, folder)))
        pid = self._start(folder, row.program, file, environment)
        try:
            begun_s = self._disturb(row, pid, folder)
            code = self._end(pid, row.bound_s + PATIENCE_S)
            seconds = time.monotonic() - begun_s
        finally:
            if pid not in self._codes:  # the stage does not end before its programs
                os.kill(pid, signal.SIGKILL)
            left = _await_nobody(folder)
        return Outcome(code, (folder / "output").read_text(), seconds, left, folder / "run")

    def _disturb(self, row: Row, pid: int, folder: Path) -> float:
        """Wait for the planted moment, send the signals, and return when it was."""
        begun_s = time.monotonic()
        if row.plant is not None:
            self._await(folder / "struck", pid)
            begun_s = float((folder / "struck").read_text())
        for count, (number, target) in enumerate(row.signals):
            if count:  # two at once would be one to the kernel
                self._await_text(folder / "output", "once more kills", pid)
            _send(number, target, pid, folder)
            begun_s = time.monotonic()
            (folder / "go").touch()
        return begun_s

    def _await(self, path: Path, pid: int) -> None:
        deadline = time.monotonic() + 4 * PATIENCE_S
        while not path.exists() and pid not in self._codes:
            assert time.monotonic() < deadline, f"{path.name}: not in time"
            time.sleep(0.01)
        assert path.exists(), f"the run ended before {path.name}: {(path.parent / 'output').read_text()}"

    def _await_text(self, path: Path, text: str, pid: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while text not in path.read_text():
            assert pid not in self._codes, f"the run ended before {text!r}: {path.read_text()}"
            assert time.monotonic() < deadline, f"{text!r}: not in time"
            time.sleep(0.01)


def _config(row: Row, folder: Path) -> dict[str, Any]:
    return {
        "collector": "tests.trainer.planting:PlantedCollector",
        "learner": "tests.trainer.planting_learner:PlantedLearner",
        "collector_options": {"delay_s": 0.005} if row.endless else {},
        "num_envs": 7,
        "num_collectors": 2,
        "total_env_steps": 7_000_000 if row.endless else 700,
        "num_updates": 2,
        "learning_starts": 70,
        "run_dir": str(folder / "run"),
        "console": "plain",
        "tensorboard": False,
        "learner_device": "cpu",
        "collector_inference_device": "cpu",
        "checkpoint_interval_s": None,
        "start_timeout_s": 4 * PATIENCE_S,
        "shutdown_timeout_s": SHUTDOWN_TIMEOUT_S,
        **row.config,
    }


def _send(number: signal.Signals, target: str, parent: int, folder: Path) -> None:
    if target == "group":
        os.killpg(parent, number)
    else:
        os.kill(parent if target == "parent" else int((folder / f"{target}.pid").read_text()), number)


def _await_nobody(folder: Path) -> list[int]:
    """Wait for the end of every process of the run, and return those that do not end."""
    deadline = time.monotonic() + 2.0 + PATIENCE_S / 6
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def processes_of(folder: Path) -> list[int]:
    """Return the pids that run with the environment of the run in ``folder``, and those that it wrote down."""
    mark = str(folder).encode()
    named = {int(text) for file in folder.glob("helper-*.pid") if (text := file.read_text())}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and (int(entry.name) in named or mark in (entry / "environ").read_bytes()):
                found.append(int(entry.name))
        except OSError:  # it has ended since it was listed
            continue
    return found


def serve() -> int:
    """Fork a program for each order on standard input; tell of starts and ends on standard output."""
    import torch

    import numa_collectors.train  # noqa: F401
    import tests.trainer.planting_learner  # noqa: F401

    torch.set_num_threads(1)
    rest, running, more = b"", set[int](), True
    while more or running:
        ready = select.select([0] if more else [], [], [], 0.02)[0]
        data = os.read(0, 1 << 16) if ready else b""
        more = more and (bool(data) or not ready)
        *orders, rest = (rest + data).split(b"\n")
        for order in map(json.loads, orders):
            pid = os.fork()
            if pid == 0:
                _become_a_program(order)
                return PROGRAMS[order["program"]](order["config"])
            running.add(pid)
            print(json.dumps({"started": {order["folder"]: pid}}), flush=True)
        for pid in sorted(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.remove(pid)
                print(json.dumps({"ended": {pid: os.waitstatus_to_exitcode(status)}}), flush=True)
    return 0


def _command(config: str) -> int:
    """Be ``python -m numa_collectors.train``."""
    from numa_collectors.train import main

    return main(["--config", config])


def _thread(config: str) -> int:
    """Train in a thread, and wait for it in the main one as if there were no signals."""
    from numa_collectors.config import load_config
    from numa_collectors.train import build_trainer

    runner = threading.Thread(target=build_trainer(load_config(config)).run)
    runner.start()
    runner.join()
    return 0


def _thread_with_signals(config: str) -> int:
    """Train in a thread, with signals passed on by the main one."""
    from numa_collectors.config import load_config
    from numa_collectors.train import build_trainer
    from numa_collectors.worker import StopSignals

    trainer = build_trainer(load_config(config))
    codes: list[int] = []
    runner = threading.Thread(target=lambda: codes.append(trainer.run().exit_code))
    with StopSignals(trainer.request_stop):
        runner.start()
        runner.join()
    return codes[0]


PROGRAMS = {"command": _command, "thread": _thread, "thread with signals": _thread_with_signals}


def _become_a_program(order: dict[str, Any]) -> None:
    os.setsid()
    output = os.open(f"{order['folder']}/output", os.O_WRONLY | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(number, target)
    os.close(nothing)
    os.close(output)
    os.environ.update(order["environment"])


if __name__ == "__main__":
    sys.exit(serve())
