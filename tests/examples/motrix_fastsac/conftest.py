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


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return ``train(framework, *overrides, check=True, **environment)``."""

    def run(framework: str, *overrides: str, task: str = "pendulum-np", check: bool = True, **environment: str) -> Run:
        place = tmp_path_factory.mktemp("run")
        command = [str(Path(sys.executable).with_name("mxlab")), "train", f"--config-dir={CONFIGS}"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "NUMA_COLLECTORS_CONSOLE": "plain", **environment}
        done = subprocess.run(
            [*command, f"task={task}/{framework}.fastsac", *overrides],
            cwd=place,
            env=variables,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        output = done.stdout + done.stderr
        assert not check or done.returncode == 0, output[-4000:]
        found = list(place.rglob("metadata.json"))
        return Run(found[0].parent if found else place, output, done.returncode)

    return run
