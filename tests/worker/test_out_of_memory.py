"""A real out-of-memory kill, in a memory cgroup that the test makes, is told from any other SIGKILL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.helpers import PATIENCE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 160 << 20
# Version 2, where the controller is delegated, and version 1: the limit's file, and that of memory with swap.
FILES = (("memory.max", "memory.swap.max"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))


def _own_groups() -> list[Path]:
    """Return this process's memory cgroup as each version names it."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append(Path("/sys/fs/cgroup/memory" + path))
        elif not controllers:
            found.append(Path("/sys/fs/cgroup" + path))
    return found


@pytest.fixture
def limited() -> Iterator[Path]:
    """Make a cgroup with little memory; skip where nobody lets us."""
    refusals = []
    for parent in _own_groups():
        group = parent / f"numa-collectors-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError as error:
            refusals.append(f"{group}: {error.strerror}")
            continue
        try:
            names = next((names for names in FILES if (group / names[0]).exists()), None)
            if names is None:
                refusals.append(f"{group}: no memory controller")
                continue
            (group / names[0]).write_text(str(LIMIT_BYTES))
            if (group / names[1]).exists():
                (group / names[1]).write_text(str(LIMIT_BYTES if "memsw" in names[1] else 0))
            yield group
            return
        finally:
            until(
                lambda group=group: not (group / "cgroup.procs").read_text().split(), "the end of the group's processes"
            )
            group.rmdir()
    pytest.skip(f"needs the right to make a memory cgroup: {'; '.join(refusals) or 'there is none'}")


def test_the_kernels_kill_is_recognised_and_the_limit_named(limited: Path) -> None:
    # The shell enters the group before the program begins: a thread of this process could not do so alone.
    command = 'echo $$ > "$0/cgroup.procs" && exec "$1" -m tests.worker.parents greedy'
    done = subprocess.run(
        ["sh", "-c", command, str(limited), sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (failure,) = json.loads(done.stdout.splitlines()[-1])["failures"]
    assert failure.startswith("worker[0] died, killed by SIGKILL")
    assert "out of memory: the kernel killed it because its cgroup reached its memory limit of 160 MiB" in failure
