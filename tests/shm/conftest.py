"""Children for tests that change what a process may do: filters, broken libraries, other masks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "binding"
ROOT = HERE.parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Child:
    """Runs code in a fresh interpreter; ``log`` is its stderr."""

    def __init__(self) -> None:
        self.log = ""

    def __call__(self, code: str, *, path: Path | None = None, env: Mapping[str, str] | None = None) -> object:
        folders = [*([str(path)] if path else []), str(ROOT), str(HERE)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMA_COLLECTORS_")}
        environment |= {"PYTHONPATH": os.pathsep.join(folders), **(env or {})}
        result = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
            check=False,
        )
        self.log = result.stderr
        assert result.returncode == 0, f"the child exited with {result.returncode}:\n{result.stdout}\n{result.stderr}"
        return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture
def child() -> Callable[..., object]:
    """Return a callable that runs code in a fresh interpreter and returns what it prints last, as JSON."""
    return Child()
