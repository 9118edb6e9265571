"""Networks of FastSAC: a tanh-Gaussian actor and twin distributional critics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import EnvSpec, FastSACConfig


class Actor(nn.Module):
    """Gaussian policy squashed by tanh.

    Actions are in [-1, 1] inside the algorithm; ``to_env`` and ``from_env`` convert. Log-probabilities are
    densities of the action in [-1, 1], so that the target entropy does not depend on the environment's units.
    """

    action_scale: Tensor
    action_bias: Tensor

    def __init__(self, spec: EnvSpec, config: FastSACConfig) -> None:
        super().__init__()
        self.log_std_min = config.log_std_min
        self.log_std_max = config.log_std_max
        self.trunk = nn.Sequential()
        width = spec.obs_dim
        for hidden in config.hidden_sizes:
            self.trunk.append(nn.Linear(width, hidden))
            if config.layer_norm:
                self.trunk.append(nn.LayerNorm(hidden))
            self.trunk.append(nn.SiLU())
            width = hidden
        self.head = nn.Linear(width, 2 * spec.action_dim)
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        self.register_buffer("action_scale", (high - low) / 2, persistent=False)
        self.register_buffer("action_bias", (high + low) / 2, persistent=False)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Map whitened observations (B, O) to mean and log standard deviation before the tanh, (B, A) each."""
        mean, raw = self.head(self.trunk(obs)).float().chunk(2, dim=-1)
        log_std = self.log_std_min + 0.5 * (self.log_std_max - self.log_std_min) * (torch.tanh(raw) + 1.0)
        return mean, log_std

    def sample(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions in [-1, 1] (B, A) and their log-probabilities (B,) for standard normal noise (B, A)."""
        mean, log_std = self(obs)
        pre_tanh = mean + log_std.exp() * noise
        return torch.tanh(pre_tanh), tanh_normal_log_prob(pre_tanh, noise, log_std)

    def to_env(self, action: Tensor) -> Tensor:
        """Scale actions from [-1, 1] to the environment's bounds."""
        return action * self.action_scale + self.action_bias

    def from_env(self, action: Tensor) -> Tensor:
        """Scale actions from the environment's bounds to [-1, 1]."""
        return (action - self.action_bias) / self.action_scale


def tanh_normal_log_prob(pre_tanh: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
    """Log-density (B,) of ``tanh(pre_tanh)``, where ``pre_tanh = mean + exp(log_std) * noise``, all (B, A).

    ``log(1 - tanh(x)**2)`` is written as ``2 * (log 2 - x - softplus(-2 x))``, which does not overflow.
    """
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    squash = 2.0 * (math.log(2.0) - pre_tanh - functional.softplus(-2.0 * pre_tanh))
    return (gaussian - squash).sum(-1)


class TwinLinear(nn.Module):
    """Two independent linear layers as one batched product: (2, B, in) to (2, B, out)."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(num_in)
        self.weight = nn.Parameter(torch.empty(2, num_in, num_out).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(2, 1, num_out).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x, self.weight)


class TwinLayerNorm(nn.Module):
    """Two independent layer norms over the last axis of (2, B, H)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(2, 1, width))
        self.bias = nn.Parameter(torch.zeros(2, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, functional.layer_norm(x, (self.width,)), self.weight)


class TwinCritic(nn.Module):
    """Two categorical return distributions Z(s, a) on a fixed support of K atoms."""

    support: Tensor

    def __init__(self, spec: EnvSpec, config: FastSACConfig) -> None:
        super().__init__()
        self.trunk = nn.Sequential()
        width = spec.obs_dim + spec.action_dim
        for hidden in config.hidden_sizes:
            self.trunk.append(TwinLinear(width, hidden))
            if config.layer_norm:
                self.trunk.append(TwinLayerNorm(hidden))
            self.trunk.append(nn.SiLU())
            width = hidden
        self.head = TwinLinear(width, config.num_atoms)
        self.register_buffer("support", torch.linspace(config.v_min, config.v_max, config.num_atoms), persistent=False)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Map whitened observations (B, O) and actions in [-1, 1] (B, A) to logits (2, B, K)."""
        x = torch.cat((obs, action), dim=-1)
        logits: Tensor = self.head(self.trunk(x.expand(2, *x.shape)))
        return logits.float()

    def q_values(self, logits: Tensor) -> Tensor:
        """Means of the distributions: logits (2, B, K) to (2, B)."""
        return logits.softmax(-1) @ self.support


def project(probs: Tensor, atoms: Tensor, support: Tensor) -> Tensor:
    """Project distributions onto a fixed support (Bellemare, Dabney and Munos 2017, algorithm 1).

    Args:
        probs: (..., K) probabilities.
        atoms: (..., K) where each of them lies; clipped to the support.
        support: (K,) evenly spaced, rising.

    Returns:
        (..., K) probabilities on the support; each mass is shared by its two neighbours in proportion to nearness.
    """
    num_atoms = support.shape[0]
    spacing = (support[-1] - support[0]) / (num_atoms - 1)
    position = ((atoms - support[0]) / spacing).clamp(0, num_atoms - 1)
    lower = position.floor()
    upper_share = position - lower
    lower_index = lower.long()
    upper_index = (lower_index + 1).clamp(max=num_atoms - 1)
    projected = torch.zeros_like(probs)
    projected.scatter_add_(-1, lower_index, probs * (1.0 - upper_share))
    projected.scatter_add_(-1, upper_index, probs * upper_share)
    return projected


def bind_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Move float32 tensors into one contiguous vector and make each a view of its part, in order.

    Writing into the returned vector changes every tensor in place, with a single copy.
    """
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = flat[offset : offset + tensor.numel()].view_as(tensor)
        offset += tensor.numel()
    return flat
