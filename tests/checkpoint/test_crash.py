"""Kills and full disks during a save, and the lock of a run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from numa_collectors.checkpoint import Progress, RunLock, checkpoints, save
from numa_collectors.checkpoint import lock as lock_module
from numa_collectors.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")

SAVER = Path(__file__).with_name("saver.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all jobs in one process: importing torch takes longer than they do."""
    root = tmp_path_factory.mktemp("crash")
    small = root / "small"
    small.mkdir()
    jobs = [
        ["every-call", "every-call", str(root / "every-call"), 0],
        ["random", "random", str(root / "random"), 25],
        ["limit", "no-room", str(root / "limit"), 100_000],
    ]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if mounted:
        jobs.append(["full", "no-room", str(small), 0])
    command = [sys.executable, str(SAVER), json.dumps(jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=ENVIRONMENT, check=False)
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found.update(json.loads(line))
    return found


def test_a_kill_before_each_call_of_a_save_leaves_a_whole_latest(reports: dict[str, Any]) -> None:
    report = reports["every-call"]
    assert report["kills"] >= 8
    assert report["appeared"] >= 2
    assert len(report["names"]) == 2
    assert all(name.startswith("checkpoint_") for name in report["names"])


def test_kills_at_random_lose_nothing_that_was_saved(reports: dict[str, Any]) -> None:
    assert reports["random"] == {"kills": 25}


def test_a_file_size_limit_leaves_the_earlier_one(reports: dict[str, Any]) -> None:
    report = reports["limit"]
    assert "got File too large; the last one stands: " in report["error"]
    assert report["names"] == ["checkpoint_00000001_step_1", "checkpoint_00000002_step_3"]


def test_a_full_disk_leaves_the_earlier_one(reports: dict[str, Any]) -> None:
    if "full" not in reports:
        pytest.skip("needs the right to mount a small tmpfs")
    report = reports["full"]
    assert "got No space left on device; the last one stands: " in report["error"]
    assert report["names"] == ["checkpoint_00000001_step_1", "checkpoint_00000002_step_3"]


# The module by its path: the package would import torch, which the lock does not need.
HOLDER = """
import runpy, sys
lock = runpy.run_path(sys.argv[2])["RunLock"](sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def test_a_held_run_directory_names_its_holder_and_a_kill_frees_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", HOLDER, str(run_dir), lock_module.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=f"run_dir: expected one that no run uses, .* process {holder.pid};"):
            RunLock(run_dir)
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=60)
    with RunLock(run_dir) as lock:
        assert lock.path.read_text() == f"{os.getpid()}\n"


def test_a_lock_excludes_its_own_process_and_is_released(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()};"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


def test_a_worker_started_meanwhile_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False, stdout=subprocess.DEVNULL
    ) as worker:
        lock.release()
        RunLock(tmp_path).release()
        worker.communicate(b"\n", timeout=60)


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir: expected a directory that can be written, got Not a directory"):
        RunLock(tmp_path / "file" / "run")


def test_the_lock_file_is_no_checkpoint(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        path = save(tmp_path / "checkpoints", {}, Progress(0, 0))
        assert checkpoints(tmp_path) == [path]
