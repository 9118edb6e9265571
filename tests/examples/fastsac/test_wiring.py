"""FastSAC on the real trainer, and what train.py makes of a run."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from examples.fastsac import FastSACConfig
from examples.fastsac.train import TASKS, evaluate, learning_curve, main, plot
from examples.fastsac.wiring import policy_from_checkpoint, wire
from numa_collectors.checkpoint import load
from numa_collectors.config import RunConfig
from numa_collectors.trainer import FanOutTrainer

SMALL = FastSACConfig(
    hidden_sizes=(8,), num_atoms=11, batch_size=16, replay_capacity=400, v_min=-20.0, v_max=0.0, n_step=2
)


def make_short_pendulum() -> gymnasium.Env:
    return gymnasium.make("Pendulum-v1", max_episode_steps=7)


def test_an_inline_run_learns_from_both_collectors_and_its_checkpoint_gives_the_policy(tmp_path: Path) -> None:
    wiring = wire(make_short_pendulum, SMALL)
    config = RunConfig(
        num_envs=3,
        num_collectors=2,
        total_env_steps=120,
        learning_starts=30,
        num_updates=2,
        inline=True,
        learner_device="cpu",
        collector_inference_device="cpu",
        console="quiet",
        tensorboard=False,
        log_interval_s=0.01,
        run_dir=tmp_path / "run",
    )
    result = FanOutTrainer(
        config, collector=wiring.collector, learner=wiring.learner, schema=wiring.schema, weights=wiring.weights
    ).run()
    assert (result.status, result.env_steps, result.updates) == ("finished", 120, 60)
    assert result.checkpoint is not None
    state = load(result.checkpoint).state["learner"]
    assert state["agent"]["num_updates"] == 60
    assert int(state["agent"]["normalizer"]["count"]) == 120
    policy = policy_from_checkpoint(state, wiring.env_spec, SMALL)
    assert torch.equal(policy.normalizer.mean, state["agent"]["normalizer"]["mean"])
    returns = evaluate("Pendulum-v1", policy, num_episodes=1)
    assert len(returns) == 1
    assert np.isfinite(returns[0])
    curve = learning_curve(result.run_dir)
    assert curve
    assert all(steps <= 120 for steps, _ in curve)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn outside the test: matplotlib keeps its font files open for good."""
    return plot("Pendulum-v1", [(8, -3.0), (16, -1.0)], tmp_path_factory.mktemp("plot") / "curve.png")


def test_the_curve_is_a_png(picture: Path) -> None:
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_learning_curve_skips_points_without_a_finished_episode(tmp_path: Path) -> None:
    lines = [{"step": 8}, {"step": 16, "rollout/mean_return": None}, {"step": 24, "rollout/mean_return": -3.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learning_curve(tmp_path) == [(24, -3.5)]


@pytest.mark.parametrize(
    ("env_id", "complaint"),
    [("CartPole-v1", "flat box of actions"), ("FrozenLake-v1", "one flat vector")],
)
def test_environments_that_do_not_fit_are_refused(env_id: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire(partial(gymnasium.make, env_id), SMALL)


def test_explain_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mujoco")
    arguments = ["--explain", f"run_dir={tmp_path / 'run'}", "num_collectors=1"]
    assert main(arguments) == 0
    assert "placement" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_setting_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["num_colectors=2"]) == 1
    assert "num_collectors" in capsys.readouterr().err


def test_settings_of_the_tasks_are_valid() -> None:
    for task in TASKS.values():
        RunConfig(**task.run)
        assert dataclasses.replace(task.algorithm) == task.algorithm
