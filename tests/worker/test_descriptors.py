"""More workers than the soft limit of open files allows: it is raised, or nothing is started and the reason is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")

SCRIPT = """
import resource, sys
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.worker import WorkerGroup
from numa_collectors.worker._descriptors import PER_WORKER
from tests.worker.helpers import PATIENCE_S, children
from tests.worker.workers import Idle

if __name__ == "__main__":
    soft, hard, workers = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    group = WorkerGroup([Idle(rank=rank) for rank in range(workers)])
    try:
        group.start()
        group.wait_ready(PATIENCE_S)
    except NumaCollectorsError as error:
        print(error, children(), resource.getrlimit(resource.RLIMIT_NOFILE))
    else:
        print(workers, "ready", resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= PER_WORKER * workers)
    assert group.stop(PATIENCE_S) == []
"""


def _run(tmp_path: Path, soft: int, hard: int, workers: int) -> str:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    repository = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, str(script), str(soft), str(hard), str(workers)],
        env={**os.environ, "PYTHONPATH": repository},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_soft_limit_is_raised_for_the_workers_that_are_asked_for(tmp_path: Path) -> None:
    # 4 workers hold 28 descriptors; the interpreter and its libraries have some of the 26 already.
    assert _run(tmp_path, 26, 4096, 4).split() == ["4", "ready", "True"]


def test_a_hard_limit_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    said = _run(tmp_path, 40, 60, 40)
    assert said.startswith("40 workers: expected room for ")
    assert "got a hard limit of 60 (RLIMIT_NOFILE); raise it" in said
    assert said.rstrip().endswith("set() (40, 60)"), "no process, and the limit as it was"
