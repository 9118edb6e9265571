"""The arms of the scaling benchmark: ways to have a policy act in many environments and the transitions reach a learner.

Each arm lives in a process of its own, the learner's, and does the same work: the same policy acts, ``num_envs`` environments
that ``gymnasium.make`` made step, and every transition (``obs``, ``action``, ``reward``, ``next_obs`` with the true last
observation of an episode, ``terminated``, ``truncated``) is copied into the learner's replay memory.  The learner makes one
update for every ``steps_per_update`` transitions, and the acting weights follow it.  Every process has one thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.comparing import CpuMeter
from numa_collectors.collector import CollectorContext, GymCollector, GymSpec, gym_schema
from numa_collectors.placement import PlacementRequest, plan, unbound
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.snapshots import WeightSpec
from numa_collectors.topo import Topology

Batch = Mapping[str, Tensor]
FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
MEMORY_ROWS, BATCH_ROWS = 100_000, 256
# TorchRL hands over batches; one of this many steps of each environment costs it little and is no staler than a full ring.
TORCHRL_STEPS = 64


@dataclass(frozen=True)
class ArmSpec:
    """What one arm is; ``kind`` is a key of :data:`KINDS`, the rest is the job, the same for all but ``num_workers``."""

    kind: str
    env_id: str
    num_envs: int
    steps_per_update: int
    num_workers: int = 1
    bound: bool = False

    @property
    def name(self) -> str:
        if self.kind != "ours":
            return self.kind
        return f"{self.num_workers} collector{'s' * (self.num_workers > 1)}, {'bound' if self.bound else 'unbound'}"


@dataclass
class Sample:
    """One measurement; ``cores`` says how many CPUs each kind of process used, and which ones it may use."""

    env_steps: int
    updates: int
    wall_s: float
    update_s: float
    cores: dict[str, float] = field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        wall_s = self.wall_s
        return {
            "env_steps_per_s": self.env_steps / wall_s,
            "env_steps_per_cpu_s": self.env_steps / wall_s / max(1e-9, sum(self.cores.values())),
            "updates_per_s": self.updates / wall_s,
            "learn_pct": 100 * self.update_s / wall_s,
        }


class Actor(nn.Module):
    """Two hidden layers of 64, and noise: what acts in every arm.  Observations (N, O) to actions (N, A) in the env's units."""

    def __init__(self, obs_dim: int, low: Sequence[float], high: Sequence[float]) -> None:
        super().__init__()
        layers = [nn.Linear(obs_dim, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, len(low)), nn.Tanh()]
        self.net = nn.Sequential(*layers)
        self.register_buffer("center", torch.tensor([(b + a) / 2 for a, b in zip(low, high, strict=True)]))
        self.register_buffer("reach", torch.tensor([(b - a) / 2 for a, b in zip(low, high, strict=True)]))

    def forward(self, obs: Tensor) -> Tensor:
        mean = self.net(obs)
        acted: Tensor = self.center + self.reach * (mean + 0.1 * torch.randn_like(mean)).clamp(-1, 1)
        return acted

    @classmethod
    def of(cls, observation_space: Any, action_space: Any) -> Actor:
        return cls(observation_space.shape[0], action_space.low.tolist(), action_space.high.tolist())


class Learner:
    """A replay memory and a small critic and actor; counts what came in and the time that updates took."""

    def __init__(self, actor: Actor, obs_dim: int, action_dim: int, steps_per_update: int) -> None:
        self.actor, self._steps_per_update = actor, steps_per_update
        self._critic = nn.Sequential(nn.Linear(obs_dim + action_dim, 64), nn.ReLU(), nn.Linear(64, 1))
        self._optimizer = torch.optim.Adam([*actor.parameters(), *self._critic.parameters()], 1e-4, foreach=True)
        sizes = {"obs": (obs_dim,), "action": (action_dim,), "next_obs": (obs_dim,)}
        flags = ("terminated", "truncated")
        self._memory = {
            name: torch.zeros(MEMORY_ROWS, *sizes.get(name, ()), dtype=torch.bool if name in flags else torch.float32)
            for name in FIELDS
        }
        self.env_steps = self.updates = 0
        self.update_s = 0.0

    def ingest(self, batch: Batch) -> None:
        """Copy rows ``(..., *field)``; oldest rows make way."""
        num_rows = batch["reward"].numel()
        start = self.env_steps % MEMORY_ROWS
        first = min(num_rows, MEMORY_ROWS - start)
        for name, memory in self._memory.items():
            rows = batch[name].reshape(num_rows, *memory.shape[1:])
            memory[start : start + first] = rows[:first]
            if first < num_rows:
                memory[: num_rows - first] = rows[first:]
        self.env_steps += num_rows

    def learn(self) -> bool:
        """Make the updates that are due; returns whether there were any."""
        due = self.env_steps // self._steps_per_update - self.updates
        begin_s = time.perf_counter()
        for _ in range(due):
            self._update()
        self.updates += due
        self.update_s += time.perf_counter() - begin_s
        return due > 0

    def _update(self) -> None:
        rows = torch.randint(min(self.env_steps, MEMORY_ROWS), (BATCH_ROWS,))
        batch = {name: memory[rows] for name, memory in self._memory.items()}
        with torch.no_grad():
            future = self._critic(torch.cat((batch["next_obs"], self.actor(batch["next_obs"])), -1)).squeeze(-1)
            target = batch["reward"] + 0.99 * ~batch["terminated"] * future
        value = self._critic(torch.cat((batch["obs"], batch["action"]), -1)).squeeze(-1)
        acted = self._critic(torch.cat((batch["obs"], self.actor(batch["obs"])), -1))
        self._optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(value, target) - acted.mean())
        self._optimizer.step()


class Arm:
    """One way to collect; :meth:`round` brings some transitions to the learner and lets it learn."""

    def __init__(self, spec: ArmSpec) -> None:
        self.spec = spec
        env = gymnasium.make(spec.env_id)
        self.spaces = (env.observation_space, env.action_space)
        env.close()
        self._cpu = CpuMeter()
        self.actor = Actor.of(*self.spaces)
        sizes = [int(np.prod(space.shape or ())) for space in self.spaces]
        self.learner = Learner(self.actor, sizes[0], sizes[1], spec.steps_per_update)

    def round(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def run(self, seconds: float) -> Sample:
        """Collect and learn for about ``seconds``."""
        learner, before_cpu = self.learner, self._cpu.read()
        before = (learner.env_steps, learner.updates, learner.update_s)
        begin_s = time.perf_counter()
        while (wall_s := time.perf_counter() - begin_s) < seconds:
            self.round()
        steps, updates, update_s = (
            learner.env_steps - before[0],
            learner.updates - before[1],
            learner.update_s - before[2],
        )
        cores = {name: (total - before_cpu.get(name, 0.0)) / wall_s for name, total in self._cpu.read().items()}
        return Sample(steps, updates, wall_s, update_s, cores)


class PoolArm(Arm):
    """This library: ``num_workers`` collectors, each with a shard, and the learner's loop in this process."""

    def __init__(self, spec: ArmSpec) -> None:
        super().__init__(spec)
        count = spec.num_workers
        request = PlacementRequest(num_collectors=count, cpus_per_collector=1, oversubscribe=True)
        placement = plan(Topology.discover(), request) if spec.bound else unbound(count, "the arm without binding")
        self._pool = CollectorPool(
            partial(GymCollector, make_env=spec.env_id, make_policy=CollectorPolicy),
            schema=gym_schema(spec.env_id).schema,
            weights=WeightSpec.like(self.actor.state_dict()),
            options=PoolOptions(spec.num_envs, count, ring_capacity=64, binding="auto" if spec.bound else "off"),
            placement=placement,
        )
        self._pool.start()
        if placement.learner.cpus is not None:
            os.sched_setaffinity(0, placement.learner.cpus)
        self._pool.publish(self.actor.state_dict())

    def round(self) -> None:
        pool, learner = self._pool, self.learner
        for rank, span in pool.drain():
            learner.ingest(pool.tensors(rank, span))
        if learner.learn():
            pool.publish(self.actor.state_dict())
        else:
            pool.wait(0.1, min_slots=8 * self.spec.num_workers)

    def close(self) -> None:
        self._pool.close()


class CollectorPolicy:
    """The actor in a collector's process."""

    def __init__(self, ctx: CollectorContext, spec: GymSpec) -> None:
        torch.set_num_threads(1)
        self._actor = Actor.of(spec.observation_space, spec.action_space)
        self._tensors = self._actor.state_dict()

    def act(self, obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            actions: np.ndarray = self._actor(torch.from_numpy(obs)).numpy()
        return actions

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(weights[name]))


class VectorArm(Arm):
    """A vector environment of Gymnasium; the policy acts in the learner's process, in step with the environments."""

    def __init__(self, spec: ArmSpec, make_vector: Callable[..., Any]) -> None:
        super().__init__(spec)
        factories = [partial(gymnasium.make, spec.env_id)] * spec.num_envs
        self._envs = make_vector(factories, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        self._obs, _ = self._envs.reset(seed=0)

    def round(self) -> None:
        obs = torch.tensor(self._obs, dtype=torch.float32)
        with torch.inference_mode():
            actions = self.actor(obs)
        self._obs, reward, terminated, truncated, infos = self._envs.step(actions.numpy())
        last = torch.tensor(self._obs, dtype=torch.float32)
        for row in np.flatnonzero(terminated | truncated):
            last[row] = torch.from_numpy(infos["final_obs"][row])
        arrays = {"reward": reward, "terminated": terminated, "truncated": truncated}
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        self.learner.ingest({"obs": obs, "action": actions, "next_obs": last, **batch})
        self.learner.learn()

    def close(self) -> None:
        self._envs.close()


class BaselinesArm(Arm):
    """Stable-Baselines3's SubprocVecEnv: one process an environment."""

    def __init__(self, spec: ArmSpec) -> None:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        super().__init__(spec)
        self._envs = SubprocVecEnv([partial(gymnasium.make, spec.env_id)] * spec.num_envs, start_method="fork")
        self._obs = self._envs.reset()

    def round(self) -> None:
        obs = torch.tensor(self._obs, dtype=torch.float32)
        with torch.inference_mode():
            actions = self.actor(obs)
        self._obs, reward, done, infos = self._envs.step(actions.numpy())
        last = torch.tensor(self._obs, dtype=torch.float32)
        truncated = torch.zeros(len(done), dtype=torch.bool)
        for row in np.flatnonzero(done):
            last[row] = torch.from_numpy(infos[row]["terminal_observation"])
            truncated[row] = infos[row]["TimeLimit.truncated"]
        ended = torch.from_numpy(done)
        batch = {"obs": obs, "action": actions, "next_obs": last, "reward": torch.from_numpy(reward)}
        self.learner.ingest({**batch, "terminated": ended & ~truncated, "truncated": truncated})
        self.learner.learn()

    def close(self) -> None:
        self._envs.close()


class TorchRLArm(Arm):
    """TorchRL's multi-process collector: ``num_workers`` processes, each with a shard of the environments and the policy."""

    def __init__(self, spec: ArmSpec) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.collectors import MultiAsyncCollector

        super().__init__(spec)
        shard = spec.num_envs // spec.num_workers
        self._collector = MultiAsyncCollector(
            [partial(_torchrl_env, spec.env_id, shard)] * spec.num_workers,
            TensorDictModule(self.actor, in_keys=["observation"], out_keys=["action"]),
            frames_per_batch=shard * TORCHRL_STEPS,
            total_frames=-1,
            num_threads=1,
            trust_policy=True,
        )
        self._batches: Iterator[Any] = iter(self._collector)

    def round(self) -> None:
        batch = next(self._batches)
        following = batch["next"]
        found = {"obs": batch["observation"], "action": batch["action"], "next_obs": following["observation"]}
        found |= {name: following[name] for name in ("reward", "terminated", "truncated")}
        self.learner.ingest(found)
        if self.learner.learn():
            self._collector.update_policy_weights_()

    def close(self) -> None:
        self._collector.shutdown()


def _float32_env(env_id: str) -> Any:
    return gymnasium.wrappers.DtypeObservation(gymnasium.make(env_id), np.float32)


def _torchrl_env(env_id: str, num_envs: int) -> Any:
    """Gymnasium's vector environment in one wrapper: less than half the time of SerialEnv over single ones."""
    from torchrl.envs import GymWrapper

    torch.set_num_threads(1)
    mode = gymnasium.vector.AutoresetMode.DISABLED  # the one that TorchRL prefers
    factories = [partial(_float32_env, env_id)] * num_envs
    return GymWrapper(gymnasium.vector.SyncVectorEnv(factories, autoreset_mode=mode))


def _make_async(factories: Sequence[Callable[[], Any]], **options: Any) -> Any:
    return gymnasium.vector.AsyncVectorEnv(factories, context="fork", **options)


KINDS: Mapping[str, tuple[Callable[[ArmSpec], Arm], str]] = {
    "ours": (PoolArm, "numa-collectors"),
    "one process (SyncVectorEnv)": (partial(VectorArm, make_vector=gymnasium.vector.SyncVectorEnv), "gymnasium"),
    "gymnasium AsyncVectorEnv": (partial(VectorArm, make_vector=_make_async), "gymnasium"),
    "Stable-Baselines3 SubprocVecEnv": (BaselinesArm, "stable-baselines3"),
    "TorchRL MultiAsyncCollector": (TorchRLArm, "torchrl"),
}


def serve(pipe: Any, spec: ArmSpec, cpus: Sequence[int]) -> None:
    """Be an arm: answer ``(settle_s, measure_s)`` with a :class:`Sample`, None with the end.

    The CPUs are set and not inherited: whoever started this may have been bound, and both sides would then share a core.
    """
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(1)
    make, package = KINDS[spec.kind]
    try:
        version = importlib.metadata.version(package)
        arm = make(spec)
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        pipe.send(("skipped", f"{type(error).__name__}: {error}"))
        return
    try:
        pipe.send(("ready", version))
        while (order := pipe.recv()) is not None:
            settle_s, measure_s = order
            arm.run(settle_s)
            pipe.send(arm.run(measure_s))
    finally:
        arm.close()
