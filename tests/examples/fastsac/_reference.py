"""Plain computations that the example is compared with, and made-up transitions."""

from __future__ import annotations

import torch
from torch import Tensor


def transitions(
    num_slots: int,
    num_envs: int,
    *,
    generator: torch.Generator,
    obs_dim: int = 3,
    action_low: tuple[float, ...] = (-2.0, 0.0),
    action_high: tuple[float, ...] = (2.0, 1.0),
    done_share: float = 0.2,
) -> dict[str, Tensor]:
    """Transitions (S, N, ...) of episodes that go on from slot to slot and begin anew after each end."""
    low, high = torch.tensor(action_low), torch.tensor(action_high)
    end = torch.rand(num_slots, num_envs, generator=generator)
    terminated = end < done_share / 2
    truncated = (end >= done_share / 2) & (end < done_share)
    obs = torch.randn(num_slots, num_envs, obs_dim, generator=generator) * 3.0 + 1.0
    next_obs = torch.randn(num_slots, num_envs, obs_dim, generator=generator)
    goes_on = ~(terminated | truncated)[:-1]
    next_obs[:-1][goes_on] = obs[1:][goes_on]
    return {
        "obs": obs,
        "action": low + (high - low) * torch.rand(num_slots, num_envs, len(low), generator=generator),
        "reward": torch.randn(num_slots, num_envs, generator=generator),
        "terminated": terminated,
        "truncated": truncated,
        "next_obs": next_obs,
    }


def naive_projection(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Algorithm 1 of Bellemare, Dabney and Munos (2017), one atom at a time, in Python's floats; (B, K)."""
    values = [float(z) for z in support]
    num_atoms, spacing = len(values), values[1] - values[0]
    out = torch.zeros(probs.shape, dtype=torch.float64)
    for row in range(probs.shape[0]):
        for source in range(num_atoms):
            value = min(max(float(atoms[row, source]), values[0]), values[-1])
            for target in range(num_atoms):
                nearness = max(0.0, 1.0 - abs(value - values[target]) / spacing)
                out[row, target] += nearness * float(probs[row, source])
    return out


def naive_n_step(
    batch: dict[str, Tensor], slot: int, env: int, n_step: int, gamma: float
) -> tuple[float, Tensor, float]:
    """Reward, next observation and discount of the n-step transition that begins at a slot, step by step."""
    reward, taken = 0.0, 0
    for step in range(n_step):
        now = slot + step
        reward += gamma**step * float(batch["reward"][now, env])
        taken = step + 1
        if batch["terminated"][now, env]:
            return reward, batch["next_obs"][now, env], 0.0
        if batch["truncated"][now, env] or now + 1 == batch["reward"].shape[0]:
            break
        if not torch.equal(batch["next_obs"][now, env], batch["obs"][now + 1, env]):
            break
    return reward, batch["next_obs"][slot + taken - 1, env], gamma**taken
