"""A tiny learner and a tiny configuration: real processes, arithmetic that can be checked by hand."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from numa_collectors.config import RunConfig
from numa_collectors.learner import LearnerContext
from numa_collectors.rings import Field, Schema
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.trainer import FanOutTrainer
from tests.trainer.collecting import CountingCollector

SCHEMA = Schema(
    [Field("obs", "float32", (3,)), Field("reward", "float32"), Field("serial", "int64"), Field("env", "int64")]
)
WEIGHTS = WeightSpec([TensorSpec("w", "float32", (4,)), TensorSpec("count", "int64", ())])


class CountingLearner:
    """Counts what it gets, checks its order, and keeps a digest of everything in arrival order."""

    def __init__(
        self, ctx: LearnerContext, *, delay_s: float = 0.0, fail_at: int | None = None, kill_at: int | None = None
    ) -> None:
        self.ctx = ctx
        self.delay_s = delay_s
        self.fail_at = None if ctx.resumed else fail_at
        self.kill_at = None if ctx.resumed else kill_at
        self.next_serial = [0] * ctx.num_collectors
        self.updates = 0
        self.total = torch.zeros(3, dtype=torch.float64)
        self.calls: list[int] = []

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        serial = batch["serial"]
        assert serial.shape == (serial.shape[0], self.ctx.num_envs[rank])
        for row in serial[:, 0].tolist():
            if not self.ctx.resumed:
                assert row == self.next_serial[rank], (
                    f"collector[{rank}]: expected slot {self.next_serial[rank]}, got {row}"
                )
            self.next_serial[rank] += 1
        self.total += batch["obs"].double().sum((0, 1))

    def update(self, num_updates: int) -> dict[str, float]:
        if self.fail_at is not None and self.updates >= self.fail_at:
            raise ValueError("planted failure of the learner")
        if self.kill_at is not None and self.updates >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.delay_s:
            time.sleep(self.delay_s)
        self.updates += num_updates
        self.calls.append(num_updates)
        return {"loss": 1.0 / self.updates}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((4,), float(self.updates)), "count": torch.tensor(self.updates)}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "total": self.total, "next_serial": list(self.next_serial)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.total = state["total"]


def make_collector(**options: Any) -> partial[CountingCollector]:
    return partial(CountingCollector, **options)


def make_learner(**options: Any) -> partial[CountingLearner]:
    return partial(CountingLearner, **options)


def toy_config(run_dir: Any, **changes: Any) -> RunConfig:
    """Return a small, quiet configuration on the CPU."""
    values: dict[str, Any] = {
        "num_envs": 7,
        "num_collectors": 2,
        "total_env_steps": 700,
        "num_updates": 2,
        "learning_starts": 70,
        "run_dir": run_dir,
        "console": "quiet",
        "learner_device": "cpu",
        "collector_inference_device": "cpu",
        "log_interval_s": 0.2,
        "start_timeout_s": 120.0,
        "shutdown_timeout_s": 10.0,
    }
    return RunConfig(**{**values, **changes})


def toy_trainer(
    run_dir: Any, *, collector: Any = None, learner: Any = None, sinks: Any = (), **changes: Any
) -> FanOutTrainer:
    """Return a trainer of the toys; ``collector`` and ``learner`` are their options."""
    return FanOutTrainer(
        toy_config(run_dir, **changes),
        collector=make_collector(**(collector or {})),
        learner=make_learner(**(learner or {})),
        schema=SCHEMA,
        weights=WEIGHTS,
        sinks=sinks,
    )
