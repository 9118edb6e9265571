"""Their environments and actor as a collector, and what learner and collectors must agree on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from motrix_env_core.registry import EnvBuildSpec
from motrix_rl_builtin.fastsac.async_impl.worker import build_env
from motrix_rl_builtin.fastsac.buffer import EmpiricalNormalization
from motrix_rl_builtin.fastsac.config import FastSacCfg
from motrix_rl_builtin.fastsac.networks import Actor
from torch import nn

from numa_collectors.collector import Collector, CollectorContext, Episode
from numa_collectors.rings import Field, Schema

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """Their recipe for the environment, their settings, and what one environment says of itself.

    ``dims``: lengths of an observation, a critic's observation and an action, whose range is ``bias`` ± ``scale``.
    """

    env: EnvBuildSpec
    cfg: FastSacCfg
    dims: tuple[int, int, int]
    scale: np.ndarray
    bias: np.ndarray

    @classmethod
    def read(cls, env: EnvBuildSpec, cfg: FastSacCfg) -> Task:
        """Build one environment, read it and let it go."""
        probe = build_env(env, 1, CPU)
        inner, low, high = probe.env, probe.action_low.numpy(), probe.action_high.numpy()
        if not np.isfinite(high - low).all():
            raise ValueError(f"expected finite bounds of actions, got {inner.action_space}: bound or rescale them")
        spaces = (inner.policy_observation_space, inner.value_observation_space, inner.action_space)
        probe.close()
        obs_dim, critic_obs_dim, action_dim = (int(space.shape[-1]) for space in spaces)
        return cls(env, cfg, (obs_dim, critic_obs_dim, action_dim), (high - low) / 2.0, (high + low) / 2.0)

    @property
    def schema(self) -> Schema:
        """One transition of one environment.

        ``final``: the environment handed over the observation before its reset; ``begins``: first slot of a collector.
        """
        obs, critic_obs, action = ((dim,) for dim in self.dims)
        sizes = {"obs": obs, "critic_obs": critic_obs, "action": action, "reward": ()}
        sizes |= {"final_obs": obs, "final_critic_obs": critic_obs}
        floats = [Field(name, "float32", size) for name, size in sizes.items()]
        return Schema([*floats, *(Field(name, "bool") for name in ("terminated", "truncated", "final", "begins"))])

    def policy(self, device: torch.device = CPU) -> nn.ModuleDict:
        """Return an ``actor`` and the ``normalizer`` of its observations, for acting only."""
        cfg, (obs_dim, _, action_dim) = self.cfg.agent, self.dims
        sizes = (obs_dim, action_dim, cfg.actor_hidden_dim, cfg.log_std_max, cfg.log_std_min)
        scale, bias = torch.from_numpy(self.scale), torch.from_numpy(self.bias)
        actor = Actor(*sizes, cfg.use_tanh, cfg.use_layer_norm, scale, bias, device)
        normalizer = EmpiricalNormalization(obs_dim, device) if cfg.obs_normalization else nn.Identity()
        return nn.ModuleDict({"actor": actor, "normalizer": normalizer}).requires_grad_(False).eval()


class MotrixCollector(Collector):
    """Steps a shard of a motrix task: uniform actions at first, then their actor behind their normaliser."""

    def __init__(self, ctx: CollectorContext, *, task: Task) -> None:
        self._ctx, self._task, self._device = ctx, task, torch.device(ctx.device)
        self._env = build_env(task.env, ctx.num_envs, CPU, seed=ctx.seed)
        # Their synchronous trainer has one actor: making a second must draw nothing.
        with torch.random.fork_rng(devices=[], enabled=not task.cfg.asynchronous):
            self._policy: Any = task.policy(self._device)
        self._weights = self._policy.state_dict()
        self._obs, self._critic_obs = self._env.reset()
        self._returns, self._lengths = np.zeros(ctx.num_envs), np.zeros(ctx.num_envs, np.int64)
        self._episodes: list[Episode] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._num_slots = 0
        self._perf = self._env.env.perf
        self._perf.enable()

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        for name, tensor in self._weights.items():
            tensor.copy_(torch.from_numpy(weights[name]))

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        with self._ctx.timer("sample_actions"):
            actions = self._act()
        # Before the step: their tensors are views of what the environment writes next.
        slot["obs"][:], slot["critic_obs"][:] = self._obs.numpy(), self._critic_obs.numpy()
        slot["action"][:] = actions.numpy()
        with self._ctx.timer("env_step"):
            result = self._env.step(actions)
        slot["reward"][:], slot["terminated"][:] = result.reward.numpy(), result.terminated.numpy()
        slot["truncated"][:], slot["begins"][:] = result.truncated.numpy(), self._num_slots == 0
        slot["final"][:], slot["final_obs"][:], slot["final_critic_obs"][:] = False, 0.0, 0.0
        if result.final_obs is not None:
            rows, obs = result.final_obs.env_ids, result.final_obs.obs
            slot["final"][rows], slot["final_obs"][rows] = True, obs.policy
            slot["final_critic_obs"][rows] = obs.value_or_policy
        self._obs, self._critic_obs = result.obs, result.critic_obs
        self._num_slots += 1
        with self._ctx.timer("bookkeep"):
            self._keep_books(slot["reward"], slot["terminated"] | slot["truncated"], result.info)

    def _act(self) -> torch.Tensor:
        if self._ctx.start_slot + self._num_slots < self._ctx.learning_starts_slots:
            uniform = torch.empty(self._ctx.num_envs, self._task.dims[-1]).uniform_(-1.0, 1.0)
            return uniform * torch.from_numpy(self._task.scale) + torch.from_numpy(self._task.bias)
        options = self._task.cfg.trainer.async_options
        dtype = torch.bfloat16 if options.collector_amp_dtype == "bf16" else torch.float16
        amp = bool(options.collector_amp) and self._device.type == "cuda"
        with torch.autocast(self._device.type, dtype, enabled=amp):
            obs = self._policy["normalizer"](self._obs.to(self._device))
            return self._policy["actor"].explore(obs).float().cpu()

    def _keep_books(self, reward: np.ndarray, done: np.ndarray, info: Mapping[str, Any]) -> None:
        self._returns += reward
        self._lengths += 1
        rows = np.flatnonzero(done)
        self._episodes += [Episode(float(self._returns[row]), int(self._lengths[row])) for row in rows]
        self._returns[rows] = self._lengths[rows] = 0
        for group, key in (("reward", "Reward"), ("metrics", "metrics")):
            for name, value in (info.get(key) or {}).items():
                self._sums[f"{group}/{name}"] += float(np.mean(value))

    def sums(self) -> Mapping[str, float]:
        times = {name: ms * self._num_slots for name, ms in self._perf.stage_mean_ms("step").items() if "." not in name}
        return self._sums | {f"perf/collector_env_step.{name}_ms": total for name, total in times.items()}

    def drain_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def close(self) -> None:
        self._env.close()
