"""Run by the tests in a process of its own: forks savers and kills them, at every system call of a save and at random.

Prints a JSON object a job with what it saw.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from numa_collectors.checkpoint import Progress, checkpoints, keep_last, latest, load, save
from numa_collectors.errors import CheckpointError

CALLS = ("mkdir", "rename", "fsync", "open", "rmdir", "unlink")


def save_numbered(directory: Path, number: int, size: int) -> None:
    save(directory, {"number": number, "w": torch.full((size,), float(number))}, Progress(number, number))


def check_latest(directory: Path) -> int:
    """Return the number of the latest checkpoint after checking that all of it belongs together, and all of the others."""
    for path in checkpoints(directory):
        load(path)
    loaded = load(directory)
    number = loaded.progress.env_steps
    assert loaded.state["number"] == number
    assert bool((loaded.state["w"] == number).all())
    return number


def in_child(body: Callable[[], None]) -> int:
    """Run ``body`` in a fork and return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        finally:  # reached by an exception alone
            traceback.print_exc()
            os._exit(7)
    return os.waitpid(pid, 0)[1]


def kill_self_at(count: int) -> None:
    """Arrange for SIGKILL right before the ``count``-th call of those that a save makes."""
    left = [count]

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def killed_at_every_call(directory: Path) -> dict[str, Any]:
    """Kill a save with keep_last(2) before each of its calls in turn; the one before or the new one must be whole."""
    number, seen = 3, []
    for first in range(1, 4):
        save_numbered(directory, first, 100)
    for count in range(1, 200):

        def body(count: int = count, number: int = number) -> None:
            kill_self_at(count)
            save_numbered(directory, number + 1, 100)
            keep_last(directory, 2)

        status = in_child(body)
        found = check_latest(directory)
        assert found in (number, number + 1), (found, number)
        seen.append(found - number)
        number = found
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return {"kills": count - 1, "appeared": sum(seen), "names": sorted(os.listdir(directory))}
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("a save makes fewer than 200 calls")


def killed_at_random(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a saver that saves without pause, at random moments; nothing that it acknowledged may be lost."""
    rng, number, saved = random.Random(seed), 0, 0
    for _ in range(kills):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            while True:
                number += 1
                save_numbered(directory, number, 200_000)
                keep_last(directory, 2)
                os.write(writing, number.to_bytes(8, "little"))
        os.close(writing)
        acknowledged = number
        for _ in range(rng.randint(1, 3)):
            acknowledged = int.from_bytes(os.read(reading, 8), "little")
        threading.Event().wait(rng.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        while data := os.read(reading, 8):
            acknowledged = int.from_bytes(data, "little")
        os.close(reading)
        number = check_latest(directory)
        assert number in (acknowledged, acknowledged + 1), (number, acknowledged)
        saved += 1
    return {"kills": saved}


def no_room(directory: Path, limit_bytes: int) -> dict[str, Any]:
    """Save until the disk, or the process's file size limit where ``limit_bytes`` is above 0, refuses."""
    save_numbered(directory, 1, 1000)
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        save_numbered(directory, 2, 1_000_000)
    except CheckpointError as error:
        assert check_latest(directory) == 1
        save_numbered(directory, 3, 1000)
        return {"error": str(error), "names": sorted(os.listdir(directory)), "latest": str(latest(directory))}
    raise AssertionError("the disk took it all")


def report_of(kind: str, directory: Path, number: int) -> dict[str, Any]:
    if kind == "every-call":
        return killed_at_every_call(directory)
    if kind == "random":
        return killed_at_random(directory, number, seed=1)
    return no_room(directory, number)


def main() -> None:
    """Run the jobs ``[name, kind, directory, number]`` of the first argument, each in a fork of its own."""
    torch.set_num_threads(1)
    for name, kind, directory, number in json.loads(sys.argv[1]):

        def job(name: str = name, kind: str = kind, directory: str = directory, number: int = number) -> None:
            print(json.dumps({name: report_of(kind, Path(directory), number)}), flush=True)

        status = in_child(job)
        assert status == 0, f"{name}: wait status {status}"


if __name__ == "__main__":
    main()
