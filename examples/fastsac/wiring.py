"""What ties FastSAC to numa_collectors: picklable factories, and the specs of slots and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from numa_collectors.collector import CollectorContext, GymCollector, GymSpec, gym_schema
from numa_collectors.learner import LearnerContext
from numa_collectors.rings import Schema
from numa_collectors.snapshots import WeightSpec

from .config import EnvSpec, FastSACConfig
from .learner import FastSACLearner
from .networks import Actor
from .normalizer import RunningNormalizer
from .policy import FastSACPolicy, policy_weights


@dataclass(frozen=True)
class Wiring:
    """The four things that ``FanOutTrainer`` and ``CollectorPool`` ask for, and the environment's sizes."""

    collector: partial[GymCollector]
    learner: partial[FastSACLearner]
    schema: Schema
    weights: WeightSpec
    env_spec: EnvSpec


def wire(make_env: Any, config: FastSACConfig) -> Wiring:
    """Read the environment's spaces once and return the factories for it.

    Args:
        make_env: what ``GymCollector`` takes: an environment id, or a picklable callable.
        config: settings of the algorithm.

    Raises:
        ValueError: its observations are not one flat vector, its actions are not a bounded box, or it loses transitions
            to next-step autoreset.
    """
    gym_spec = gym_schema(make_env)
    env_spec = env_spec_of(gym_spec)
    return Wiring(
        collector=partial(GymCollector, make_env=make_env, make_policy=partial(make_policy, config=config)),
        learner=partial(make_learner, env_spec=env_spec, config=config),
        schema=gym_spec.schema,
        weights=weight_spec(env_spec, config),
        env_spec=env_spec,
    )


def env_spec_of(spec: GymSpec) -> EnvSpec:
    """Return the sizes that FastSAC needs; see ``wire`` for the errors."""
    shapes = [leaf.shape for leaf in spec.obs_leaves]
    if len(shapes) != 1 or len(shapes[0]) != 1:
        raise ValueError(f"FastSAC needs observations of one flat vector, got shapes {shapes}; use FlattenObservation")
    if spec.autoreset_mode == "NextStep":
        raise ValueError(
            "FastSAC takes every row for a transition; use same-step autoreset, as single environments get"
        )
    low, high = getattr(spec.action_space, "low", None), getattr(spec.action_space, "high", None)
    if low is None or high is None or np.ndim(low) != 1:
        raise ValueError(f"FastSAC needs a flat box of actions, got {spec.action_space}")
    return EnvSpec(shapes[0][0], tuple(low.tolist()), tuple(high.tolist()))


def weight_spec(env_spec: EnvSpec, config: FastSACConfig) -> WeightSpec:
    """Return names, dtypes and shapes of what travels to the collectors."""
    return WeightSpec.like(policy_weights(Actor(env_spec, config), RunningNormalizer(env_spec.obs_dim)))


def make_policy(ctx: CollectorContext, spec: GymSpec, *, config: FastSACConfig) -> FastSACPolicy:
    return FastSACPolicy(env_spec_of(spec), config, device=ctx.device, seed=ctx.seed)


def make_learner(ctx: LearnerContext, *, env_spec: EnvSpec, config: FastSACConfig) -> FastSACLearner:
    if config.learner_threads is not None:
        torch.set_num_threads(config.learner_threads)
    return FastSACLearner(env_spec, config, num_envs=ctx.num_envs, device=ctx.device, seed=ctx.seed)


def policy_from_checkpoint(
    state: Mapping[str, Any], env_spec: EnvSpec, config: FastSACConfig, *, version: int = 0
) -> FastSACPolicy:
    """Return the deterministic policy of a learner's ``state_dict``."""
    learner = FastSACLearner(env_spec, config, num_envs=(1,))
    learner.load_state_dict({"agent": state["agent"]})
    policy = FastSACPolicy(env_spec, config, deterministic=True)
    policy.load_weights({name: tensor.numpy() for name, tensor in learner.weights().items()}, version)
    return policy
