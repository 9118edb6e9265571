"""FastSAC (soft actor-critic for many parallel environments) on numa_collectors.

The package knows the library through two seams only: ``FastSACLearner`` has the five methods of the Learner protocol
and ``FastSACPolicy`` the two of the Policy protocol. ``train.py`` puts them together.
"""

from .agent import FastSAC
from .config import EnvSpec, FastSACConfig
from .learner import FastSACLearner
from .policy import FastSACPolicy, policy_weights
from .replay import ReplayMemory

__all__ = ["EnvSpec", "FastSAC", "FastSACConfig", "FastSACLearner", "FastSACPolicy", "ReplayMemory", "policy_weights"]
