"""Runs of ``mxlab train``, each in a process of its own: motrixsim keeps what it opens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CONFIGS = Path(__file__).resolve().parents[3] / "examples" / "motrix_fastsac" / "configs"


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    directory: Path
    output: str
    code: int

    def model(self, name: str = "latest.pt") -> dict[str, Any]:
        import torch

        state: dict[str, Any] = torch.load(self.directory / "checkpoints" / name, weights_only=False)
        return state


Train = Callable[..., Run]


def mxlab(*arguments: str, cwd: Path, **environment: str) -> Run:
    """Run their command in ``cwd``."""
    # A worker imports torch and a simulator; on a crowded machine that takes minutes.
    variables = {"OMP_NUM_THREADS": "1", "NUMA_COLLECTORS_CONSOLE": "plain", "NUMA_COLLECTORS_START_TIMEOUT_S": "450"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("mxlab")), *arguments],
        cwd=cwd,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return Run(cwd, done.stdout + done.stderr, done.returncode)


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return ``train(framework, *overrides, check=True, **environment)``."""

    def run(framework: str, *overrides: str, task: str = "pendulum-np", check: bool = True, **environment: str) -> Run:
        place = tmp_path_factory.mktemp("run")
        command = ["train", f"--config-dir={CONFIGS}"]
        command += [f"task={task}/{framework}.fastsac", *overrides]
        done = mxlab(*command, cwd=place, **environment)
        assert not check or done.code == 0, done.output[-4000:]
        found = list(place.rglob("metadata.json"))
        return Run(found[0].parent if found else place, done.output, done.code)

    return run
