"""The algorithm: soft actor-critic with categorical twin critics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import EnvSpec, FastSACConfig
from .networks import Actor, TwinCritic, project
from .normalizer import RunningNormalizer
from .replay import Batch


class FastSAC:
    """Networks, optimisers and one gradient update of FastSAC.

    Args:
        spec: sizes of the environment.
        config: settings of the algorithm.
        device: where everything lies; mixed precision and compilation are used on CUDA only.
        seed: of the initial weights and of the actions sampled in the losses. torch's global generator is left alone.
    """

    def __init__(
        self, spec: EnvSpec, config: FastSACConfig, *, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.spec = spec
        self.config = config
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Actor(spec, config).to(self.device)
            self.critic = TwinCritic(spec, config).to(self.device)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.normalizer = RunningNormalizer(spec.obs_dim).to(self.device)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.alpha_init), device=self.device))
        self.target_entropy = -config.target_entropy_ratio * spec.action_dim
        self.num_updates = 0

        self._critic_optimizer = self._adam(self.critic.parameters(), config.critic_lr)
        self._actor_optimizer = self._adam(self.actor.parameters(), config.actor_lr)
        self._alpha_optimizer = self._adam([self.log_alpha], config.alpha_lr)
        self._critic_parameters = list(self.critic.parameters())
        self._target_parameters = list(self.target_critic.parameters())

        on_cuda = self.device.type == "cuda"
        self._amp = config.amp and on_cuda
        self._compute_critic_loss: Callable[..., tuple[Tensor, Tensor]] = self.critic_loss
        self._compute_actor_loss: Callable[..., tuple[Tensor, Tensor]] = self.actor_loss
        if config.compile and on_cuda:
            self._compute_critic_loss = torch.compile(self.critic_loss)
            self._compute_actor_loss = torch.compile(self.actor_loss)

    def _adam(self, parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=learning_rate, betas=(0.9, 0.95), fused=_fused_adam(self.device))

    @property
    def alpha(self) -> Tensor:
        """Temperature, a scalar without gradient."""
        return self.log_alpha.detach().exp()

    def normalize(self, obs: Tensor) -> Tensor:
        return self.normalizer(obs) if self.config.normalize_obs else obs

    def update(self, batch: Batch) -> dict[str, Tensor]:
        """Make one update of the critics and, every ``policy_frequency`` of them, of actor and temperature.

        Returns:
            Scalars on the device; those of the actor are missing where it was not updated.
        """
        obs, next_obs = self.normalize(batch.obs), self.normalize(batch.next_obs)
        action = self.actor.from_env(batch.action)
        with self._autocast():
            critic_loss, q_mean = self._compute_critic_loss(
                obs, action, batch.reward, next_obs, batch.discount, self._noise(action), self.alpha
            )
        critic_grad_norm = self._descend(critic_loss, self._critic_optimizer, self._critic_parameters)
        metrics = {"critic_loss": critic_loss.detach(), "q_mean": q_mean, "critic_grad_norm": critic_grad_norm}

        self.num_updates += 1
        if self.num_updates % self.config.policy_frequency == 0:
            metrics.update(self._update_actor(obs))
        with torch.no_grad():
            for target, online in zip(self._target_parameters, self._critic_parameters, strict=True):
                target.lerp_(online, self.config.tau)
        return metrics

    def critic_loss(
        self,
        obs: Tensor,
        action: Tensor,
        reward: Tensor,
        next_obs: Tensor,
        discount: Tensor,
        noise: Tensor,
        alpha: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy between both critics' distributions and the projected soft Bellman target, and the mean value.

        Observations (B, O) are whitened, actions (B, A) in [-1, 1], the rest (B,).
        """
        support = self.critic.support
        with torch.no_grad():
            next_action, log_prob = self.actor.sample(next_obs, noise)
            next_logits = self.target_critic(next_obs, next_action)
            next_probs = next_logits.softmax(-1)
            if self.config.clipped_double_q:
                first, second = next_probs @ support
                lower = torch.where((first < second).unsqueeze(-1), next_probs[0], next_probs[1])
                next_probs = lower.expand_as(next_probs)
            soft_support = support - (alpha * log_prob).unsqueeze(-1)
            atoms = reward.unsqueeze(-1) + discount.unsqueeze(-1) * soft_support
            target = project(next_probs, atoms.expand_as(next_probs), support)
        logits = self.critic(obs, action)
        loss = -(target * functional.log_softmax(logits, dim=-1)).sum(-1).mean(-1).sum()
        return loss, self.critic.q_values(logits.detach()).mean()

    def actor_loss(self, obs: Tensor, noise: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """``E[alpha log pi(a|s) - Q(s, a)]`` and the log-probabilities (B,), for whitened observations (B, O)."""
        action, log_prob = self.actor.sample(obs, noise)
        q_values = self.critic.q_values(self.critic(obs, action))
        value = q_values.amin(0) if self.config.clipped_double_q else q_values.mean(0)
        return (alpha * log_prob - value).mean(), log_prob

    def alpha_loss(self, log_prob: Tensor) -> Tensor:
        """Its gradient in ``log_alpha`` is ``alpha * (entropy - target_entropy)``: too random a policy cools down."""
        return -(self.log_alpha.exp() * (log_prob.detach() + self.target_entropy)).mean()

    def _update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        # The critics' own gradients are not wanted here; without them the backward pass costs half.
        self.critic.requires_grad_(False)
        noise = torch.randn(obs.shape[0], self.spec.action_dim, generator=self.generator, device=self.device)
        with self._autocast():
            actor_loss, log_prob = self._compute_actor_loss(obs, noise, self.alpha)
        actor_grad_norm = self._descend(actor_loss, self._actor_optimizer, list(self.actor.parameters()))
        self.critic.requires_grad_(True)
        alpha_loss = self.alpha_loss(log_prob)
        self._descend(alpha_loss, self._alpha_optimizer, None)
        return {
            "actor_loss": actor_loss.detach(),
            "actor_grad_norm": actor_grad_norm,
            "alpha": self.alpha,
            "entropy": -log_prob.detach().mean(),
        }

    def _descend(self, loss: Tensor, optimizer: torch.optim.Optimizer, clipped: list[nn.Parameter] | None) -> Tensor:
        """Take one step down ``loss``; return the norm of the gradient before clipping, 0 where it is not computed."""
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.zeros((), device=self.device)
        if clipped is not None and self.config.max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(clipped, self.config.max_grad_norm)
        optimizer.step()
        return norm

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, device=self.device)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._amp)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on: tensors and plain values only."""
        return {
            "actor": self.actor.state_dict(),
            "critic": self.critic.state_dict(),
            "target_critic": self.target_critic.state_dict(),
            "normalizer": self.normalizer.state_dict(),
            "log_alpha": self.log_alpha.detach(),
            "critic_optimizer": self._critic_optimizer.state_dict(),
            "actor_optimizer": self._actor_optimizer.state_dict(),
            "alpha_optimizer": self._alpha_optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` gave; shapes must agree."""
        for name in ("actor", "critic", "target_critic", "normalizer"):
            getattr(self, name).load_state_dict(state[name])
        with torch.no_grad():
            self.log_alpha.copy_(state["log_alpha"])
        self._critic_optimizer.load_state_dict(state["critic_optimizer"])
        self._actor_optimizer.load_state_dict(state["actor_optimizer"])
        self._alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.num_updates = int(state["num_updates"])


def _fused_adam(device: torch.device) -> bool:
    """Whether Adam has a fused kernel for ``device``: on the CPU since torch 2.4."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return device.type == "cuda" or (device.type == "cpu" and (major, minor) >= (2, 4))
