"""Their agent as a learner; the replay memory is kept by collector."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from motrix_rl import checkpoints
from motrix_rl_builtin.fastsac.async_impl.transport.ring import FinalObsPayload
from motrix_rl_builtin.fastsac.async_impl.worker import build_agent, set_seed
from motrix_rl_builtin.fastsac.buffer import SimpleReplayBuffer
from torch import nn

from numa_collectors.learner import LearnerContext

from .collector import Task


class ShardedReplay:
    """One of their buffers for each collector: nothing is assembled across collectors, the slowest holds up no other.

    Their agent samples ``n`` rows of each environment; here too, of the environments whose collector has brought data.
    """

    def __init__(self, num_envs: Sequence[int], task: Task, device: torch.device) -> None:
        cfg, (obs_dim, critic_obs_dim, action_dim) = task.cfg.agent, task.dims
        sizes = (cfg.buffer_size, obs_dim, action_dim, critic_obs_dim, cfg.num_steps, cfg.gamma)
        # The last argument: a store of final observations, which changes no sample as long as none is written.
        self.shards = tuple(SimpleReplayBuffer(envs, *sizes, device, True) for envs in num_envs)
        self._num_envs = sum(num_envs)

    def extend(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        """Append the slots of one collector, shape (slots, environments, ...)."""
        shard = self.shards[rank]
        if shard.ptr and bool(batch["begins"].any()):
            _end_trajectories(shard)
        some = bool(batch["final"].any())
        finals = [_final_rows(batch, slot) for slot in range(len(batch["final"]))] if some else None
        names = ("obs", "critic_obs", "action", "reward", "terminated", "truncated")
        shard.extend_batch(*(batch[name] for name in names), final_payloads=finals)

    def sample(self, rows_per_env: int) -> dict[str, torch.Tensor]:
        """Return ``rows_per_env`` rows for each environment of the run."""
        ready = [shard for shard in self.shards if shard.num_stored] or self.shards
        rows = rows_per_env * self._num_envs
        parts = [shard.sample(-(-rows // sum(shard.n_env for shard in ready))) for shard in ready]
        return {name: torch.cat([part[name] for part in parts])[:rows] for name in parts[0]}


def _final_rows(batch: Mapping[str, torch.Tensor], slot: int) -> FinalObsPayload:
    rows = torch.nonzero(batch["final"][slot]).flatten()
    return FinalObsPayload(rows, batch["final_obs"][slot, rows], batch["final_critic_obs"][slot, rows])


def _end_trajectories(shard: SimpleReplayBuffer) -> None:
    """Close what a lost collector left open: its last row has no successor and goes; the row before ends with it."""
    shard.ptr -= 1
    last, before = (step % (shard.buffer_size + 1) for step in (shard.ptr, shard.ptr - 1))
    rows = torch.nonzero(shard.dones[:, before] + shard.truncations[:, before] == 0).flatten()
    shard.truncations[rows, before] = 1
    shard.write_final(rows, shard.ptr - 1, shard.observations[rows, last], shard.critic_observations[rows, last])


class MotrixLearner:
    """Their agent behind the learner's protocol; ``save_interval``: iterations from one model file of theirs to the next."""

    def __init__(self, ctx: LearnerContext, *, task: Task, seed: int, run_dir: Path, save_interval: int) -> None:
        if ctx.num_collectors == 1:
            # As their trainer does; with several, the learner keeps a stream of its own.
            set_seed(seed)
        torch.set_float32_matmul_precision("high")
        device = torch.device(ctx.device)
        self._num_envs, self._run_dir, self._save_interval = sum(ctx.num_envs), run_dir, save_interval
        # The agent's own buffer is replaced: it is made as small as can be.
        small = replace(task.cfg, agent=replace(task.cfg.agent, buffer_size=1))
        scale, bias = torch.from_numpy(task.scale), torch.from_numpy(task.bias)
        self.agent = build_agent(small, task.dims, self._num_envs, device, scale, bias)
        self.agent.rb = ShardedReplay(ctx.num_envs, task, device)
        self.agent.set_train_mode()
        # As a collector has it: parameters, and the statistics of the normaliser with them.
        self._policy = nn.ModuleDict({"actor": self.agent.actor, "normalizer": self.agent.obs_normalizer})
        self._env_steps = self._saved = 0
        self._metrics: dict[str, float] = {}
        self._next_metrics_s = 0.0

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        self.agent.rb.extend(rank, batch)
        self.agent.window_metrics.add("final_obs_events", batch["final"].sum())
        self._env_steps += batch["reward"].numel()
        self.agent.global_step = self._env_steps // self._num_envs

    def update(self, num_updates: int) -> Mapping[str, float]:
        self.agent.update(num_updates)
        step, interval = self.agent.global_step, self._save_interval
        if interval and step // interval > self._saved // interval:
            self._saved = step
            save_model(self.agent.state_dict(), self._run_dir, f"model_{step:07d}.pt")
        if time.monotonic() >= self._next_metrics_s:
            # Reading the window waits for the device, so it is done once a second only.
            self._next_metrics_s = time.monotonic() + 1.0
            self._metrics = self.agent.window_metrics.stats_and_reset()
        return self._metrics

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._policy.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self.agent.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.agent.load_state_dict(state)
        self._env_steps, self._saved = self.agent.global_step * self._num_envs, self.agent.global_step


def save_model(state: Mapping[str, Any], run_dir: Path, name: str, *, best: bool = False) -> None:
    """Write a model file of theirs, whole or not at all, and enter it in their manifest."""
    path = checkpoints.standard_checkpoint_dir(run_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".tmp").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".tmp").replace(path)
    checkpoints.record_checkpoint_artifact(run_dir, checkpoints.LATEST_TRAINING_STATE, path, checkpoints.TRAINING_STATE)
    if best:
        checkpoints.record_checkpoint_artifact(run_dir, checkpoints.BEST_POLICY, path, checkpoints.POLICY)
