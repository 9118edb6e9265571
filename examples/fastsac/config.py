"""What FastSAC is built from: the environment's sizes and the algorithm's settings."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EnvSpec:
    """Sizes of one environment with flat continuous observations and actions.

    Attributes:
        obs_dim: O, length of an observation.
        action_low, action_high: A finite bounds, in the environment's units.
    """

    obs_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.obs_dim < 1:
            raise ValueError(f"obs_dim must be at least 1, got {self.obs_dim}")
        if not self.action_low or len(self.action_low) != len(self.action_high):
            raise ValueError(
                f"action_low and action_high must have the same length of at least 1, "
                f"got {len(self.action_low)} and {len(self.action_high)}"
            )
        for low, high in zip(self.action_low, self.action_high, strict=True):
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(
                    f"a tanh policy needs finite action bounds with low < high, got [{low}, {high}]; "
                    f"rescale the action space (gymnasium.wrappers.RescaleAction) or clip it"
                )

    @property
    def action_dim(self) -> int:
        return len(self.action_low)


@dataclass(frozen=True)
class FastSACConfig:
    """Settings of the algorithm. Lengths in transitions, rates per gradient step.

    Attributes:
        hidden_sizes: widths of the hidden layers, of the actor and of each critic.
        layer_norm: normalise every hidden layer before its activation.
        normalize_obs: whiten observations with running statistics, which travel with the weights.
        num_atoms, v_min, v_max: support of the return distribution. Returns outside are clipped to it.
        clipped_double_q: learn from the twin with the smaller mean; otherwise each twin from itself.
        gamma, n_step: discount a step, and steps of reward before bootstrapping.
        tau: share of the critics that moves into their targets at each update.
        policy_frequency: critic updates for one update of actor and temperature.
        alpha_init: temperature at the start.
        target_entropy_ratio: the policy's entropy is held at ``-ratio * A`` nats, of actions scaled to [-1, 1].
        log_std_min, log_std_max: range of the policy's log standard deviation before the tanh.
        max_grad_norm: clip gradients to this norm, None to leave them.
        replay_capacity: transitions kept, over all collectors.
        save_replay: put the replay memory into ``state_dict``.
        amp: bfloat16 autocast; has effect on CUDA only.
        compile: torch.compile of the losses; has effect on CUDA only.
        learner_threads: torch's threads in the learner's process, None to leave them. Small networks want one: a second
            thread gains nothing and spins for a core that a collector may need.
    """

    hidden_sizes: tuple[int, ...] = (256, 256)
    layer_norm: bool = True
    normalize_obs: bool = True
    num_atoms: int = 101
    v_min: float = -20.0
    v_max: float = 20.0
    clipped_double_q: bool = True
    gamma: float = 0.99
    n_step: int = 1
    tau: float = 0.005
    policy_frequency: int = 2
    critic_lr: float = 3e-4
    actor_lr: float = 3e-4
    alpha_lr: float = 3e-4
    alpha_init: float = 0.1
    target_entropy_ratio: float = 0.5
    log_std_min: float = -5.0
    log_std_max: float = 0.0
    max_grad_norm: float | None = None
    batch_size: int = 256
    replay_capacity: int = 1_000_000
    save_replay: bool = False
    amp: bool = True
    compile: bool = True
    learner_threads: int | None = None

    def __post_init__(self) -> None:
        self._require(
            bool(self.hidden_sizes) and min(self.hidden_sizes) >= 1, "hidden_sizes", "one or more widths >= 1"
        )
        self._require(self.num_atoms >= 2, "num_atoms", "at least 2")
        self._require(self.v_min < self.v_max, "v_min", f"below v_max ({self.v_max})")
        self._require(0.0 <= self.gamma <= 1.0, "gamma", "in [0, 1]")
        self._require(0.0 < self.tau <= 1.0, "tau", "in (0, 1]")
        self._require(self.alpha_init > 0.0, "alpha_init", "above 0")
        self._require(self.log_std_min < self.log_std_max, "log_std_min", f"below log_std_max ({self.log_std_max})")
        for name in ("n_step", "policy_frequency", "batch_size", "replay_capacity"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        self._require(
            self.learner_threads is None or self.learner_threads >= 1, "learner_threads", "None or at least 1"
        )
        for name in ("critic_lr", "actor_lr", "alpha_lr"):
            self._require(getattr(self, name) > 0.0, name, "above 0")

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise ValueError(f"FastSACConfig.{name} must be {expected}, got {getattr(self, name)!r}")
