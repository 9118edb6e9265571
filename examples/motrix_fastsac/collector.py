"""Their environments and actor as a collector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from motrix_env_core.registry import EnvBuildSpec
from motrix_rl_builtin.fastsac.async_impl.worker import build_env
from motrix_rl_builtin.fastsac.buffer import EmpiricalNormalization
from motrix_rl_builtin.fastsac.config import FastSacAgentCfg, FastSacCfg
from motrix_rl_builtin.fastsac.networks import Actor
from torch import nn

from numa_collectors.collector import Collector, CollectorContext, Episode
from numa_collectors.rings import Field, Schema


@dataclass(frozen=True)
class EnvShape:
    """Sizes of a task and its actions' range; ``final_obs`` as their asynchronous trainer decides it."""

    obs_dim: int
    critic_obs_dim: int
    action_dim: int
    scale: np.ndarray
    bias: np.ndarray
    final_obs: bool

    @classmethod
    def of(cls, spec: EnvBuildSpec) -> EnvShape:
        """Build one environment, read it and let it go."""
        env = build_env(spec, 1, torch.device("cpu"))
        spaces = (env.env.policy_observation_space, env.env.value_observation_space, env.env.action_space)
        obs_dim, critic_obs_dim, action_dim = (int(space.shape[-1]) for space in spaces)
        low, high = env.action_low.numpy(), env.action_high.numpy()
        if not np.isfinite(high - low).all():
            raise ValueError(f"expected finite bounds of actions, got {env.env.action_space}")
        final_obs = env.max_episode_steps is not None
        env.close()
        return cls(obs_dim, critic_obs_dim, action_dim, (high - low) / 2.0, (high + low) / 2.0, final_obs)

    @property
    def schema(self) -> Schema:
        """One transition of one environment; ``begins`` marks the first slot of a collector that was started anew."""
        sizes = {"obs": (self.obs_dim,), "critic_obs": (self.critic_obs_dim,), "action": (self.action_dim,)}
        finals = {f"final_{name}": sizes[name] for name in ("obs", "critic_obs")} if self.final_obs else {}
        flags = ("terminated", "truncated", "begins", *(("final",) if self.final_obs else ()))
        floats = [Field(name, "float32", size) for name, size in ({"reward": ()} | sizes | finals).items()]
        return Schema([*floats, *(Field(name, "bool") for name in flags)])

    def policy(self, cfg: FastSacAgentCfg, device: torch.device) -> tuple[Actor, nn.Module]:
        """Return an actor and the observation normaliser before it, for acting only."""
        sizes = (self.obs_dim, self.action_dim, cfg.actor_hidden_dim, cfg.log_std_max, cfg.log_std_min)
        scale, bias = torch.from_numpy(self.scale), torch.from_numpy(self.bias)
        actor = Actor(*sizes, cfg.use_tanh, cfg.use_layer_norm, scale, bias, device)
        normalizer = EmpiricalNormalization(self.obs_dim, device) if cfg.obs_normalization else nn.Identity()
        return actor.requires_grad_(False), normalizer.eval()


def policy_tensors(actor: Actor, normalizer: nn.Module) -> dict[str, torch.Tensor]:
    """Return all that a collector needs to act: parameters, and the statistics of the normaliser with them."""
    tensors = {f"actor.{name}": tensor.detach() for name, tensor in actor.named_parameters()}
    return tensors | {f"normalizer.{name}": tensor for name, tensor in normalizer.named_buffers()}


class MotrixCollector(Collector):
    """Steps a shard of a motrix task: uniform actions at first, then their actor behind their normaliser."""

    def __init__(
        self, ctx: CollectorContext, *, spec: EnvBuildSpec, cfg: FastSacCfg, shape: EnvShape, inline: bool
    ) -> None:
        self._ctx, self._shape, self._options = ctx, shape, cfg.trainer.async_options
        self._device = torch.device(ctx.device)
        self._env = build_env(spec, ctx.num_envs, torch.device("cpu"), seed=ctx.seed)
        # In one process with the learner, their trainer makes no second actor: its initialisation must draw nothing.
        with torch.random.fork_rng(devices=[], enabled=inline):
            self._actor, self._normalizer = shape.policy(cfg.agent, self._device)
        self._tensors = policy_tensors(self._actor, self._normalizer)
        self._obs, self._critic_obs = self._env.reset()
        self._returns, self._lengths = np.zeros(ctx.num_envs), np.zeros(ctx.num_envs, np.int64)
        self._episodes: list[Episode] = []
        self._sums: dict[str, float] = {}
        self._num_slots = 0
        self._perf = getattr(self._env.env, "perf", None)
        if self._perf is not None:
            self._perf.enable()

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        for name, tensor in self._tensors.items():
            tensor.copy_(torch.from_numpy(weights[name]))

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        with self._ctx.timer("sample_actions"):
            actions = self._act()
        # Before the step: their tensors are views of what the environment writes next.
        slot["obs"][:], slot["critic_obs"][:], slot["action"][:] = self._obs, self._critic_obs, actions
        with self._ctx.timer("env_step"):
            result = self._env.step(actions)
        slot["reward"][:], slot["terminated"][:] = result.reward, result.terminated
        slot["truncated"][:], slot["begins"][:] = result.truncated, self._num_slots == 0
        if self._shape.final_obs:
            for name in ("final", "final_obs", "final_critic_obs"):
                slot[name][:] = 0
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
            uniform = torch.empty(self._ctx.num_envs, self._shape.action_dim).uniform_(-1.0, 1.0)
            return uniform * torch.from_numpy(self._shape.scale) + torch.from_numpy(self._shape.bias)
        dtype = torch.bfloat16 if self._options.collector_amp_dtype == "bf16" else torch.float16
        amp = bool(self._options.collector_amp) and self._device.type == "cuda"
        with torch.no_grad(), torch.autocast(self._device.type, dtype, enabled=amp):
            return self._actor.explore(self._normalizer(self._obs.to(self._device))).float().cpu()

    def _keep_books(self, reward: np.ndarray, done: np.ndarray, info: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self._returns += reward
        self._lengths += 1
        rows = np.flatnonzero(done)
        self._episodes += [Episode(float(self._returns[row]), int(self._lengths[row])) for row in rows]
        self._returns[rows] = self._lengths[rows] = 0
        for group, key in (("reward", "Reward"), ("metrics", "metrics")):
            for name, value in (info.get(key) or {}).items():
                tag = f"{group}/{name}"
                self._sums[tag] = self._sums.get(tag, 0.0) + float(np.mean(value))

    def sums(self) -> Mapping[str, float]:
        stages = {} if self._perf is None else self._perf.stage_mean_ms("step")
        stages = {f"perf/collector_env_step.{name}_ms": ms for name, ms in stages.items() if "." not in name}
        return self._sums | {tag: ms * self._num_slots for tag, ms in stages.items()}

    def drain_episodes(self) -> list[Episode]:
        episodes, self._episodes = self._episodes, []
        return episodes

    def close(self) -> None:
        self._env.close()
