"""A run is given the same transitions whether its rings are plain or compact."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numa_collectors import FanOutTrainer, Field, Schema, TensorSpec, WeightSpec, checkpoint
from numa_collectors.collector import Collector, CollectorContext
from numa_collectors.errors import ConfigError
from numa_collectors.learner import LearnerContext
from tests.trainer.toys import toy_config

SCHEMA = Schema(
    [
        Field("obs", "float32", (5,)),
        Field("action", "float32", (2,)),
        Field("reward", "float32"),
        Field("terminated", "bool"),
        Field("truncated", "bool"),
        Field("next_obs", "float32", (5,)),
    ]
)
WEIGHTS = WeightSpec([TensorSpec("w", "float32", (5, 2))])


class WalkCollector(Collector):
    """Random walks of random length, reset in the step that ends them; ``kill_at`` ends generation 0 amid a slot."""

    def __init__(self, ctx: CollectorContext, *, kill_at: int | None = None) -> None:
        self.ctx = ctx
        self.kill_at = kill_at if ctx.generation == 0 and ctx.rank == 1 else None
        self.rng = np.random.default_rng(ctx.seed)
        self.obs = self.rng.standard_normal((ctx.num_envs, 5), np.float32)
        self.weights = np.zeros((5, 2), np.float32)
        self.num_slots = 0

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self.weights = weights["w"].copy()

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        slot["obs"][...] = self.obs
        slot["action"][...] = self.obs @ self.weights
        self.obs += 0.1 * self.rng.standard_normal(self.obs.shape, np.float32)
        slot["next_obs"][...] = self.obs
        if self.num_slots == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        slot["reward"][...] = self.obs.sum(1)
        slot["terminated"][...] = self.rng.random(self.ctx.num_envs) < 0.05
        slot["truncated"][...] = self.rng.random(self.ctx.num_envs) < 0.05
        ended = slot["terminated"] | slot["truncated"]
        self.obs[ended] = self.rng.standard_normal((int(ended.sum()), 5), np.float32)
        self.num_slots += 1


class HashingLearner:
    """Keeps one digest of everything that it was given, in the order in which it was, for each collector."""

    def __init__(self, ctx: LearnerContext, *, act: bool) -> None:
        self.hashes = [hashlib.sha256() for _ in range(ctx.num_collectors)]
        self.scale = float(act)
        self.updates = 0

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        assert list(batch) == list(SCHEMA.names)
        for slot in range(len(batch["obs"])):
            for name, values in batch.items():
                self.hashes[rank].update(name.encode() + values[slot].contiguous().numpy().tobytes())

    def update(self, num_updates: int) -> dict[str, float]:
        self.updates += num_updates
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.full((5, 2), self.scale * self.updates)}

    def state_dict(self) -> dict[str, Any]:
        return {"digests": [digest.hexdigest() for digest in self.hashes]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def trainer(
    run_dir: Path, layout: str, *, kill_at: int | None = None, schema: Schema = SCHEMA, **changes: Any
) -> FanOutTrainer:
    return FanOutTrainer(
        toy_config(run_dir, ring_layout=layout, ring_capacity=6, restart_backoff_s=0.01, **changes),
        collector=partial(WalkCollector, kill_at=kill_at),
        learner=partial(HashingLearner, act=changes.get("inline", False)),
        schema=schema,
        weights=WEIGHTS,
    )


def inputs(run_dir: Path) -> list[str]:
    return list(checkpoint.load(run_dir).state["learner"]["digests"])


def test_strict_runs_get_identical_inputs_from_both_layouts_inline(tmp_path: Path) -> None:
    """Acting on what was learnt, so that one different byte would change all that follows."""
    for name, layout, seed in (("a", "plain", 3), ("b", "compact", 3), ("c", "compact", 4)):
        assert trainer(tmp_path / name, layout, inline=True, seed=seed).run().env_steps == 700
    assert inputs(tmp_path / "a") == inputs(tmp_path / "b") != inputs(tmp_path / "c")


def written(rank: int, kill_at: int | None) -> str:
    """Return the digest of what collector ``rank`` writes, without rings: 100 slots over two generations."""
    context = CollectorContext.for_rank(rank, num_collectors=2, total_num_envs=7, run_seed=0)
    digest = hashlib.sha256()
    collector = WalkCollector(context)
    for index in range(100):
        if index == kill_at:
            collector = WalkCollector(context.restarted(1, start_slot=index))
        slot = {field.name: np.zeros((context.num_envs, *field.shape), field.dtype) for field in SCHEMA.fields}
        collector.collect(slot)
        for name, values in slot.items():
            digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def test_a_collector_that_is_killed_amid_a_slot_costs_a_compact_run_no_transition(tmp_path: Path) -> None:
    result = trainer(tmp_path / "run", "compact", kill_at=40, on_collector_exit="restart").run()
    assert (result.env_steps, result.num_restarts, result.discarded_slots) == (700, 1, 0)
    assert inputs(tmp_path / "run") == [written(0, None), written(1, 40)]


def test_a_schema_without_pairs_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="next_x"):
        trainer(tmp_path / "run", "compact", schema=Schema([Field("obs", "float32", (5,))]))
    assert not (tmp_path / "run").exists()
