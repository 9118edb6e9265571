"""FastSAC as a learner of numa_collectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .agent import FastSAC
from .config import EnvSpec, FastSACConfig
from .policy import policy_weights
from .replay import ReplayMemory


class FastSACLearner:
    """Replay memory and algorithm behind the five methods of the Learner protocol.

    Args:
        spec: sizes of the environment.
        config: settings of the algorithm.
        num_envs: environments of each collector, by rank.
        device: of networks and replay memory.
        seed: of weights, sampling and losses.
    """

    def __init__(
        self,
        spec: EnvSpec,
        config: FastSACConfig,
        *,
        num_envs: Sequence[int],
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config
        self.agent = FastSAC(spec, config, device=device, seed=seed)
        self._metrics: dict[str, float] = {}
        self.replay = ReplayMemory(
            num_envs, config.replay_capacity, spec.obs_dim, spec.action_dim, device=self.agent.device
        )

    @property
    def num_transitions(self) -> int:
        """Transitions that the replay memory holds; what a warm-up has to wait for, also after a resume."""
        return self.replay.num_transitions

    @property
    def ready(self) -> bool:
        """Whether the memory holds a batch."""
        return self.num_transitions >= self.config.batch_size

    def ingest(self, rank: int, batch: Mapping[str, Tensor]) -> None:
        """Store transitions of collector ``rank`` and add their observations to the normaliser.

        Args:
            batch: ``obs`` and ``next_obs`` (S, N, O), ``action`` (S, N, A) in the environment's units, ``reward``,
                ``terminated`` and ``truncated`` (S, N). Copied: the caller may reuse the tensors.
        """
        self.replay.extend(rank, batch)
        if self.config.normalize_obs:
            self.agent.normalizer.merge(batch["obs"])

    def update(self, num_updates: int) -> dict[str, float]:
        """Make exactly ``num_updates`` gradient updates.

        Returns:
            Means over these updates; of what none of them touched (the delayed actor), the values last seen.

        Raises:
            ValueError: nothing was ingested yet.
        """
        seen: dict[str, list[Tensor]] = {}
        for _ in range(num_updates):
            batch = self.replay.sample(
                self.config.batch_size,
                n_step=self.config.n_step,
                gamma=self.config.gamma,
                generator=self.agent.generator,
            )
            for name, value in self.agent.update(batch).items():
                seen.setdefault(name, []).append(value)
        if seen:
            # One copy to the host for all scalars: each on its own would wait for the device.
            means = torch.stack([torch.stack(values).mean() for values in seen.values()]).tolist()
            self._metrics.update(zip(seen, means, strict=True))
        return dict(self._metrics)

    def weights(self) -> Mapping[str, Tensor]:
        """Actor parameters and normaliser statistics: names, shapes and order never change."""
        return policy_weights(self.agent.actor, self.agent.normalizer)

    def state_dict(self) -> dict[str, Any]:
        """The algorithm's state and, with ``save_replay``, the replay memory."""
        state: dict[str, Any] = {"agent": self.agent.state_dict()}
        if self.config.save_replay:
            state["replay"] = self.replay.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave; without a saved replay memory this one begins empty."""
        self.agent.load_state_dict(state["agent"])
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])
