"""An environment and a learner of your own on two pinned collectors: ``python examples/quickstart.py``.

A point in the plane has to reach the origin. The environment is plain numpy, the learner a small actor-critic without a
future (its critic predicts the next reward, its actor climbs that); the library knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from numa_collectors.collector import Collector, CollectorContext, Episode
from numa_collectors.config import RunConfig
from numa_collectors.learner import LearnerContext
from numa_collectors.rings import Field, Schema
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer

EPISODE_STEPS = 20
SCHEMA = Schema(
    [Field("obs", "float32", (2,)), Field("action", "float32", (2,)), Field("reward", "float32", ())]
)  # of one transition of one environment


def make_actor() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2), nn.Tanh())


class PointCollector(Collector):
    """Steps ``ctx.num_envs`` points at once: the action is a velocity in [-1, 1], the reward minus the distance."""

    def __init__(self, ctx: CollectorContext) -> None:
        self.rng = np.random.default_rng(ctx.seed)
        self.actor = make_actor()
        self.positions = self.rng.uniform(-1, 1, (ctx.num_envs, 2)).astype(np.float32)
        self.returns = np.zeros(ctx.num_envs)
        self.steps = 0
        self.episodes: list[Episode] = []

    def collect(self, slot: Mapping[str, np.ndarray[Any, Any]]) -> None:
        slot["obs"][:] = self.positions  # before the step: what was acted on
        with torch.inference_mode():
            action = self.actor(torch.from_numpy(self.positions)).numpy()
        action = np.clip(action + self.rng.normal(0, 0.3, action.shape), -1, 1)
        self.positions += 0.2 * action.astype(np.float32)
        reward = -np.linalg.norm(self.positions, axis=1)
        slot["action"][:], slot["reward"][:] = action, reward
        self.returns += reward
        self.steps += 1
        if self.steps % EPISODE_STEPS == 0:
            self.episodes += [Episode(float(total), EPISODE_STEPS) for total in self.returns]
            self.returns[:] = 0
            self.positions[:] = self.rng.uniform(-1, 1, self.positions.shape)

    def load_weights(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> None:
        self.actor.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})

    def drain_episodes(self) -> list[Episode]:
        episodes, self.episodes = self.episodes, []
        return episodes


class PointLearner:
    """Keeps the newest transitions and learns from random ones."""

    def __init__(self, ctx: LearnerContext, capacity: int = 10_000) -> None:
        torch.manual_seed(ctx.seed)
        self.actor = make_actor()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_optimizer = torch.optim.Adam(
            self.critic.parameters(), 1e-2
        )  # ahead of the actor, or that climbs noise
        self.memory = torch.zeros(capacity, 5)
        self.stored = 0

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        rows = torch.cat((batch["obs"], batch["action"], batch["reward"].unsqueeze(-1)), -1).reshape(-1, 5)
        self.memory[(self.stored + torch.arange(len(rows))) % len(self.memory)] = rows
        self.stored += len(rows)

    def update(self, num_updates: int) -> Mapping[str, float]:
        for _ in range(num_updates):
            rows = self.memory[torch.randint(min(self.stored, len(self.memory)), (128,))]
            obs, reward = rows[:, :2], rows[:, 4]
            critic_loss = nn.functional.mse_loss(self.critic(rows[:, :4]).squeeze(-1), reward)
            self._descend(self.critic_optimizer, critic_loss)
            self._descend(self.actor_optimizer, -self.critic(torch.cat((obs, self.actor(obs)), -1)).mean())
        return {"critic_loss": critic_loss.item()}

    def _descend(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.actor.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return {"actor": self.actor.state_dict(), "critic": self.critic.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.actor.load_state_dict(state["actor"])
        self.critic.load_state_dict(state["critic"])


if __name__ == "__main__":
    trainer = FanOutTrainer(
        RunConfig(num_envs=16, num_collectors=2, total_env_steps=20_000, learning_starts=640, log_interval_s=1.0),
        collector=PointCollector,
        learner=partial(PointLearner, capacity=20_000),
        schema=SCHEMA,
        weights=WeightSpec.like(make_actor().state_dict()),
    )
    print(trainer.run().summary())
