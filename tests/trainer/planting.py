"""Faults planted into a run, by phase; imports no torch, so that the collectors' processes start fast.

What is planted stands in the environment variable ``DISTURBANCE`` (JSON), which every process of the run inherits: so
it can strike while a worker's modules are being imported, and all processes of a run can be told from others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from numa_collectors.collector import CollectorContext
from numa_collectors.rings import Field, Schema
from tests.trainer.collecting import CountingCollector, misbehave

VARIABLE = "DISTURBANCE"
_GO_TIMEOUT_S = 20.0


class Plan:
    """``what`` is done by ``role`` ``rank`` in ``phase``; the moment is written into ``folder`` before."""

    def __init__(self) -> None:
        planted: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
        self.folder = Path(planted.get("folder", "."))
        self.where = (planted.get("role"), planted.get("rank"), planted.get("phase"))
        self.what: str = planted.get("what", "")
        self.helpers: bool = planted.get("helpers", False)

    def register(self, name: str) -> None:
        """Tell the test this process's pid."""
        write_whole(self.folder / f"{name}.pid", str(os.getpid()))

    def at(self, role: str, rank: int, phase: str, slot: Mapping[str, np.ndarray] | None = None) -> None:
        """Strike if this is the place."""
        if (role, rank, phase) != self.where or (self.folder / "struck").exists():
            return
        write_whole(self.folder / "struck", str(time.monotonic()))
        if self.what == "mark":
            self._wait_for_go()
        elif self.what == "shape" and slot is not None:
            slot["obs"][:] = np.zeros((*slot["obs"].shape[:-1], slot["obs"].shape[-1] - 1))
        elif self.what == "exit3":
            os._exit(3)
        elif self.what == "raise" and slot is None:
            raise RuntimeError(f"planted failure in {phase}")
        else:
            misbehave(self.what, slot or {"serial": np.zeros(1)})

    def _wait_for_go(self) -> None:
        """Stay in the phase until the test has done what it wants to do there."""
        deadline = time.monotonic() + _GO_TIMEOUT_S
        while not (self.folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.01)


def write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)


class PlantedCollector(CountingCollector):
    """A :class:`CountingCollector` in which faults can be planted."""

    schema = Schema(
        [Field("obs", "float32", (3,)), Field("reward", "float32"), Field("serial", "int64"), Field("env", "int64")]
    )

    def __init__(self, ctx: CollectorContext, **options: Any) -> None:
        super().__init__(ctx, **options)
        self.plan = Plan()
        self.plan.register(f"collector-{ctx.rank}")
        if self.plan.helpers:
            self._start_helpers()
        self.plan.at("collector", ctx.rank, "boot")

    def _start_helpers(self) -> None:
        """Start processes of its own: one in a session of its own, one without the run's environment."""
        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        started = [subprocess.Popen(command, start_new_session=True), subprocess.Popen(command, env={})]
        for number, process in enumerate(started):
            write_whole(self.plan.folder / f"helper-{self.ctx.rank}-{number}.pid", str(process.pid))

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self.step == 0:
            self.plan.at("collector", self.ctx.rank, "first update", slot)
        if self.step == 30:
            self.plan.at("collector", self.ctx.rank, "training", slot)
        super().collect(slot)
        if self.plan.what == "nan" and self.step == 31 and self.ctx.rank == self.plan.where[1]:
            slot["reward"][0] = np.nan

    def close(self) -> None:
        self.plan.at("collector", self.ctx.rank, "shutdown")


if multiprocessing.parent_process() is not None:
    Plan().at("any", 0, "imports")
