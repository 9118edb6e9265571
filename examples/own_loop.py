"""Pinned collectors inside a training loop that stays yours: ``python examples/own_loop.py``.

A plain DQN on CartPole. The library places and feeds two collectors; buffer, updates, when to publish and when to stop are
this file's. Needs gymnasium: ``pip install numa-collectors[examples]``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from numa_collectors.collector import CollectorContext, GymCollector, GymSpec, gym_schema
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.snapshots import WeightSpec

ENV, NUM_ENVS, TOTAL_ENV_STEPS = "CartPole-v1", 8, 40_000
BATCH_SIZE, GAMMA, TAU = 128, 0.99, 0.01


def make_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class EpsilonGreedy:
    """The collectors' policy: at random once in ten steps, otherwise the better action."""

    def __init__(self, ctx: CollectorContext, spec: GymSpec) -> None:
        self.rng = np.random.default_rng(ctx.seed)
        self.network = make_network()

    def act(self, obs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            best = self.network(torch.from_numpy(obs)).argmax(-1).numpy()
        explore = self.rng.random(len(obs)) < 0.1
        return np.where(explore, self.rng.integers(0, 2, len(obs)), best)

    def load_weights(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        self.network.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})


class Buffer:
    """Transitions of all collectors in the order in which they came."""

    def __init__(self, capacity: int) -> None:
        self.fields: dict[str, torch.Tensor] = {}
        self.capacity, self.added = capacity, 0

    def add(self, batch: Mapping[str, torch.Tensor]) -> None:
        num_rows = batch["reward"].numel()
        rows = (self.added + torch.arange(num_rows)) % self.capacity
        for name, tensor in batch.items():
            shape = (self.capacity, *tensor.shape[2:])
            self.fields.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[rows] = tensor.flatten(0, 1)
        self.added += num_rows

    def sample(self, size: int) -> dict[str, torch.Tensor]:
        rows = torch.randint(min(self.added, self.capacity), (size,))
        return {name: tensor[rows] for name, tensor in self.fields.items()}


def update(
    online: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> None:
    """One step of double DQN."""
    with torch.no_grad():
        best = online(batch["next_obs"]).argmax(-1, keepdim=True)
        future = target(batch["next_obs"]).gather(-1, best).squeeze(-1)
        wanted = batch["reward"] + GAMMA * ~batch["terminated"] * future
    value = online(batch["obs"]).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.smooth_l1_loss(value, wanted))
    optimizer.step()
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.data.lerp_(new.data, TAU)


def main() -> None:
    torch.manual_seed(0)
    online = make_network()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), 1e-3)
    buffer = Buffer(20_000)
    options = PoolOptions(
        num_envs=NUM_ENVS,
        num_collectors=2,
        quota_slots=TOTAL_ENV_STEPS // NUM_ENVS,
        ring_capacity=64,
        max_lead_slots=4,  # how far a collector may run ahead of the updates
        learning_starts_slots=100,
    )
    make_collector = partial(GymCollector, make_env=ENV, make_policy=EpsilonGreedy)
    weights = WeightSpec.like(online.state_dict())
    with CollectorPool(make_collector, schema=gym_schema(ENV).schema, weights=weights, options=options) as pool:
        pool.publish(online.state_dict())
        updates, shown = 0, 0
        for rank, span in pool.spans(max_slots=8):
            buffer.add(pool.tensors(rank, span))
            while updates < buffer.added // NUM_ENVS - 100:
                update(online, target, optimizer, buffer.sample(BATCH_SIZE))
                updates += 1
            pool.publish(online.state_dict())
            if buffer.added - shown >= 5_000:
                shown = buffer.added
                episodes = sum(stats["episodes"] for stats in pool.stats().values())
                lengths = sum(stats["length_sum"] for stats in pool.stats().values())
                print(
                    f"{buffer.added:6d} env steps, {updates:5d} updates, mean episode so far {lengths / episodes:.1f}"
                )


if __name__ == "__main__":
    main()
