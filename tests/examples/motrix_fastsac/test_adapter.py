"""The adapter's parts in this process: options, weights with their normaliser, final observations, seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "motrix_fastsac", reason="motrix is not installed here: `make demo-motrix` makes an environment that has it"
)
import numpy as np
import torch
from motrix_env_core import registry
from motrix_env_core.array.env import FinalObs
from motrix_fastsac.collector import CPU, MotrixCollector, Task
from motrix_fastsac.learner import MotrixLearner
from motrix_fastsac.plugin import run_config
from motrix_fastsac.tasks.pendulum import PendulumCfg, PendulumNumpyEnv
from motrix_rl.contracts import TrainerContext
from motrix_rl_builtin.fastsac.async_impl.worker import build_env, set_seed

from numa_collectors.collector import CollectorContext
from numa_collectors.errors import ConfigError
from numa_collectors.learner import LearnerContext
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer
from tests.examples.motrix_fastsac.conftest import CONFIGS

# torch's own, at the first update of motrix's agent.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")


def recipe(*overrides: str) -> Any:
    """Return the composed recipe of ``pendulum-np/numa.fastsac``, as ``mxlab train`` composes it."""
    from hydra import compose, initialize_config_module
    from motrix_rl.cli import to_typed_config
    from motrix_rl.config import TrainConfig
    from motrix_rl.plugins import load_plugins

    load_plugins()
    small = ("num_envs=6", "algo.agent.batch_size=24", "algo.trainer.num_learning_iterations=60")
    search = f"hydra.searchpath=[file://{CONFIGS}]"
    with initialize_config_module("motrix_rl.configs", version_base=None):
        composed = compose("train", overrides=["task=pendulum-np/numa.fastsac", search, *small, *overrides])
    return to_typed_config(composed, TrainConfig)


def context(config: Any, run_dir: Path) -> TrainerContext[Any]:
    sizes = {"num_envs": config.num_envs, "play_num_envs": 1, "seed": config.seed, "checkpoint_format": "pt"}
    paths = {"run_dir": run_dir, "checkpoint_dir": run_dir / "checkpoints", "run": None, "sim": None}
    rest = {"rl_cfg": config.algo, "logging": config.logging, "checkpoint": config.checkpoint}
    return TrainerContext(env_name=config.task.env, **sizes, **paths, **rest)


@pytest.fixture
def task() -> Task:
    return Task.read(registry.resolve("pendulum-np"), recipe().algo)


def slot_of(task: Task, num_envs: int) -> dict[str, np.ndarray]:
    return {field.name: np.zeros((num_envs, *field.shape), field.dtype) for field in task.schema.fields}


def collector_of(task: Task, **fields: Any) -> MotrixCollector:
    ctx = CollectorContext(num_envs=6, total_num_envs=6, **fields)
    set_seed(ctx.seed)
    return MotrixCollector(ctx, task=task)


def learner_of(task: Task, run_dir: Path, *num_envs: int) -> MotrixLearner:
    ctx = LearnerContext(device="cpu", num_collectors=len(num_envs), num_envs=num_envs, seed=0)
    return MotrixLearner(ctx, task=task, seed=1, run_dir=run_dir, save_interval=0)


def tensors(slot: dict[str, np.ndarray], rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value[rows].copy())[None] for name, value in slot.items()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_collectors", 3),
        ("cpus_per_collector", 2),
        ("ring_capacity", 17),
        ("utd_mode", "learner_bound"),
        ("weight_publish_interval", 9),
        ("weight_poll_interval", 5),
        ("max_ingest_per_iter", 6),
        ("collector_inference_device", "cuda:1"),
    ],
)
def test_an_option_of_theirs_is_ours_by_the_same_name(name: str, value: Any, tmp_path: Path) -> None:
    config = run_config(context(recipe(f"algo.trainer.async_options.{name}={value}"), tmp_path))
    assert getattr(config, name) == value
    plain = run_config(context(recipe(), tmp_path))
    changed = {field for field in type(config).model_fields if getattr(config, field) != getattr(plain, field)}
    assert changed == {name}


def test_settings_in_iterations_become_env_steps(tmp_path: Path) -> None:
    config = run_config(context(recipe("seed=7", "algo.agent.learning_starts=10"), tmp_path))
    assert (config.total_env_steps, config.learning_starts, config.num_updates) == (360, 60, 4)
    assert (config.seed, config.inline, config.learner_device) == (7, False, "cpu")
    assert run_config(context(recipe("algo.asynchronous=false"), tmp_path)).inline


@pytest.mark.parametrize("option", ["num_learners=2", "learner_cpu_cores='0'", "collector_cpu_cores='0:1'"])
def test_an_option_without_a_counterpart_is_refused_by_name(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{option.split('=')[0]}: expected (1|None), got .*cpus_per_collector"):
        run_config(context(recipe(f"algo.trainer.async_options.{option}"), tmp_path))


def test_normaliser_statistics_travel_with_the_weights(task: Task, tmp_path: Path) -> None:
    collector, learner = collector_of(task), learner_of(task, tmp_path, 6)
    slot = slot_of(task, 6)
    for _ in range(5):
        collector.collect(slot)
        learner.ingest(0, tensors(slot))
    learner.update(4)
    weights = learner.weights()
    assert int(weights["normalizer.count"]) > 0
    collector.load_weights({name: value.numpy().copy() for name, value in weights.items()}, 1)
    obs = 5.0 * torch.randn(6, 3) + 2.0
    acted = collector._policy["actor"].explore(collector._policy["normalizer"](obs), deterministic=True)
    assert torch.equal(acted, learner.agent.act(obs, deterministic=True))
    # A collector only reads the statistics.
    assert int(collector._policy["normalizer"].count) == int(weights["normalizer.count"])


def test_one_collector_begins_with_the_numbers_of_theirs(task: Task) -> None:
    """What motrix's collector process draws, in its order: seed, environments, actor, reset, uniform actions."""
    slot, slots = slot_of(task, 6), []
    collector = collector_of(task, seed=3, learning_starts_slots=20)
    for _ in range(20):
        collector.collect(slot)
        slots.append({name: value.copy() for name, value in slot.items()})
    set_seed(3)
    env = build_env(task.env, 6, CPU, seed=3)
    task.policy()
    obs, _ = env.reset()
    for slot in slots:
        actions = torch.empty(6, 1).uniform_(-1.0, 1.0)
        assert np.array_equal(slot["obs"], obs.numpy())
        assert np.array_equal(slot["action"], actions.numpy())
        obs = env.step(actions).obs


class CapturingPendulum(PendulumNumpyEnv):
    """Hands over the observations before a reset, as motrix's manager environments do."""

    def _capture_final_obs(self, env_ids: np.ndarray) -> FinalObs:
        obs = self.observe(self._angle[env_ids], self._velocity[env_ids])
        return FinalObs(env_ids=env_ids, obs=obs)


def test_final_observations_arrive_as_their_buffer_wants_them(task: Task, tmp_path: Path) -> None:
    if "pendulum-capture" not in registry.list_registered_envs():
        registry.register_env_config("pendulum-capture", PendulumCfg)
        registry.register_env("pendulum-capture", CapturingPendulum)
    task = Task.read(registry.resolve("pendulum-capture"), task.cfg)
    collector, learner = collector_of(task, learning_starts_slots=1000), learner_of(task, tmp_path, 6)
    slot, ended = slot_of(task, 6), []
    for step in range(203):
        collector.collect(slot)
        learner.ingest(0, tensors(slot))
        if slot["final"].any():
            ended.append((step, slot["final_obs"].copy(), slot["obs"].copy()))
    ((step, final_obs, obs_before),) = ended
    assert step == 199
    # One step on from the observation that was acted on, not the reset's.
    assert float(np.abs(final_obs - obs_before).max()) < 0.5
    sample = learner.agent.rb.sample(2000)
    cut = sample["truncations"] == 1
    assert bool(cut.any())
    rows = {tuple(row) for row in sample["next_obs"][cut].tolist()}
    assert rows == {tuple(row) for row in torch.from_numpy(final_obs).tolist()}


class GatedCollector(MotrixCollector):
    """Collector 1 delivers nothing until the learner, on the data of collector 0 alone, opens the gate."""

    gate: str

    def collect(self, slot: Any) -> None:
        if self._ctx.rank == 1 and self._num_slots == 0:
            # Opening a pipe for reading waits for its writer.
            Path(self.gate).read_bytes()
        super().collect(slot)


def gated_collector(ctx: CollectorContext, *, task: Task, gate: str) -> GatedCollector:
    collector = GatedCollector(ctx, task=task)
    collector.gate = gate
    return collector


class GatedLearner(MotrixLearner):
    def __init__(self, ctx: LearnerContext, *, gate: str, **options: Any) -> None:
        super().__init__(ctx, **options)
        self._gate, self._updates = gate, 0

    def update(self, num_updates: int) -> Any:
        metrics = super().update(num_updates)
        before, self._updates = self._updates, self._updates + num_updates
        if before < 40 <= self._updates:
            assert self.agent.rb.shards[1].ptr == 0
            Path(self._gate).write_bytes(b"open")
        return metrics


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "gate"
    os.mkfifo(path)
    yield str(path)
    path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_collector_holds_up_no_other(tmp_path: Path, gate: str) -> None:
    config = recipe("algo.trainer.async_options.num_collectors=2")
    task = Task.read(registry.resolve("pendulum-np"), config.algo)
    run = run_config(context(config, tmp_path)).replace(console="quiet")
    options = {"task": task, "gate": gate, "seed": 1, "run_dir": tmp_path, "save_interval": 0}
    result = FanOutTrainer(
        run,
        collector=partial(gated_collector, task=task, gate=gate),
        learner=partial(GatedLearner, **options),
        schema=task.schema,
        weights=WeightSpec.like(task.policy().state_dict()),
    ).run()
    assert (result.status, result.env_steps, result.updates) == ("finished", 360, 200)


def test_the_optimum_of_the_convergence_page_is_of_this_pendulum(task: Task) -> None:
    from benchmarks.pendulum_optimum import physics, reward

    collector, slot = collector_of(task, learning_starts_slots=100), slot_of(task, 6)
    predicted = None
    for _ in range(50):
        collector.collect(slot)
        if predicted is not None:
            np.testing.assert_allclose(slot["obs"], predicted, atol=1e-5)
        cos, sin, speed = (slot["obs"][:, column].astype(np.float64) for column in range(3))
        torque = slot["action"][:, 0].astype(np.float64)
        angle, velocity = physics(np.arctan2(-sin, -cos), 8.0 * speed, torque)
        predicted = np.stack([-np.cos(angle), -np.sin(angle), velocity / 8.0], axis=1)
        np.testing.assert_allclose(slot["reward"], reward(angle, velocity, torque), atol=1e-4)
