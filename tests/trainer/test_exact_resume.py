"""Stopped and resumed, an inline run ends with the same bytes as one that was never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numa_collectors import checkpoint
from numa_collectors.collector import Collector, CollectorContext, Episode
from numa_collectors.errors import CheckpointError
from numa_collectors.learner import LearnerContext
from numa_collectors.rings import Field, Schema
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.trainer import FanOutTrainer, RunFailedError, RunResult
from tests.trainer.toys import make_collector, make_learner, toy_config

SCHEMA = Schema([Field("obs", "float32", (3,)), Field("reward", "float32")])
WEIGHTS = WeightSpec([TensorSpec("w", "float32", (3,))])
EPISODE_SLOTS = 10


class Walk(Collector):
    """A random walk that the weights pull at; its episodes are ten slots long and all begin at the origin.

    The noise comes from numpy's global generator, which a checkpoint holds; so a run that stops between two episodes can be
    continued exactly, though its environments are reset.
    """

    def __init__(self, ctx: CollectorContext) -> None:
        self.step = ctx.start_slot
        self.position = np.zeros((ctx.num_envs, 3), np.float32)
        self.w = np.zeros(3, np.float32)

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self.w = weights["w"].copy()

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self.step % EPISODE_SLOTS == 0:
            self.position[:] = 0
        slot["obs"][:] = self.position
        self.position += self.w + np.random.standard_normal(self.position.shape).astype(np.float32)
        slot["reward"][:] = -np.square(self.position).sum(1)
        self.step += 1

    def drain_episodes(self) -> list[Episode]:
        return []


class Regression(torch.nn.Module):
    """Regresses rewards on observations drawn from a replay memory, which is part of its state; Adam with its moments."""

    def __init__(self, ctx: LearnerContext) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(3) / 10)
        self.optimizer = torch.optim.Adam([self.w], lr=1e-2)
        self.replay: list[torch.Tensor] = []

    @property
    def num_transitions(self) -> int:
        return sum(len(rows) for rows in self.replay)

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        self.replay.append(torch.cat([batch["obs"], batch["reward"][..., None]], -1).flatten(0, 1).clone())

    def update(self, num_updates: int) -> dict[str, float]:
        rows = torch.cat(self.replay)
        for _ in range(num_updates):
            drawn = rows[torch.randint(len(rows), (16,))]
            loss = torch.square(drawn[:, :3] @ self.w - torch.tanh(drawn[:, 3])).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": float(loss.detach())}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self.w.detach()}

    def state_dict(self, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.w.detach(), "optimizer": self.optimizer.state_dict(), "replay": torch.cat(self.replay)}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.w.copy_(state["w"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.replay = [state["replay"]]


def run(run_dir: Path, total_env_steps: int, **changes: Any) -> RunResult:
    config = toy_config(
        run_dir, inline=True, tensorboard=False, total_env_steps=total_env_steps, weight_publish_interval=1, **changes
    )
    return FanOutTrainer(
        config, collector=partial(Walk), learner=partial(Regression), schema=SCHEMA, weights=WEIGHTS
    ).run()


def bytes_of(value: Any) -> Any:
    """Return ``value`` with every tensor as its bytes."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bytes_of(part) for key, part in value.items()}
    return [bytes_of(part) for part in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("num_collectors", [1, 2])
def test_resume_equals_the_uninterrupted_run_to_the_byte(tmp_path: Path, num_collectors: int) -> None:
    whole = run(tmp_path / "whole", 1400, num_collectors=num_collectors)
    for total in (560, 980, 1400):
        resume = {} if total == 560 else {"resume": "latest"}
        parts = run(tmp_path / "parts", total, num_collectors=num_collectors, **resume)
    assert (parts.env_steps, parts.updates) == (whole.env_steps, whole.updates) == (1400, 380)
    expected, got = (checkpoint.load(tmp_path / name).state for name in ("whole", "parts"))
    assert bytes_of(got["learner"]) == bytes_of(expected["learner"])
    assert bytes_of(got["rng"]) == bytes_of(expected["rng"])
    assert expected["learner"]["replay"].shape == (1400, 4)


def test_a_learner_that_cannot_take_the_state_is_a_named_error(tmp_path: Path) -> None:
    config = {"inline": True, "tensorboard": False}
    run(tmp_path / "run", 560)
    with pytest.raises(RunFailedError, match=r"expected a learner that takes the state of .*KeyError: 'updates'"):
        FanOutTrainer(
            toy_config(tmp_path / "run", resume="latest", total_env_steps=700, **config),
            collector=partial(Walk),
            learner=make_learner(),
            schema=SCHEMA,
            weights=WEIGHTS,
        ).run()


@pytest.mark.parametrize("changed", ["schema", "weights"])
def test_specs_that_contradict_the_checkpoint_are_a_named_error(tmp_path: Path, changed: str) -> None:
    run(tmp_path / "run", 560)
    others = {
        "schema": Schema([*SCHEMA.fields, Field("extra", "float32")]),
        "weights": WeightSpec([TensorSpec("w", "float32", (4,))]),
    }
    parts: dict[str, Any] = {"schema": SCHEMA, "weights": WEIGHTS, changed: others[changed]}
    with pytest.raises(CheckpointError, match=f"{changed}: expected .* as in .*checkpoint_00000001_step_560"):
        FanOutTrainer(
            toy_config(tmp_path / "run", resume="latest", inline=True, total_env_steps=1400),
            collector=make_collector(),
            learner=partial(Regression),
            **parts,
        )
