"""Whether a process that claimed something still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numa_collectors._identity import is_running, process_start_time


def test_this_process_runs_since_it_started() -> None:
    start = process_start_time(os.getpid())
    assert start is not None
    assert is_running(os.getpid(), start)
    assert not is_running(os.getpid(), start + 1)
    assert not is_running(0, 0)
    assert not is_running(-1, 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")
def test_a_zombie_and_a_reaped_process_do_not_run() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start_time(process.pid)
    assert start is not None
    assert is_running(process.pid, start)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert process_start_time(process.pid) is None
    process.communicate()
    assert process_start_time(process.pid) is None
    assert not is_running(process.pid, start)
