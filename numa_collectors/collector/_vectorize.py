"""Makes a Gymnasium vector environment out of what the user gave.  The only module that imports Gymnasium."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, iterate

from numa_collectors.collector.context import CollectorContext, CollectorError
from numa_collectors.collector.spaces import leaves
from numa_collectors.errors import ConfigError, SchemaMismatchError

__all__ = ["action_sampler", "autoreset_mode", "build", "max_episode_steps", "takes_seed_list"]

_MODES = ("NextStep", "SameStep", "Disabled")


class _Named(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says which of several environments raised or gave an observation of another shape than its space's."""

    def __init__(self, env: gymnasium.Env[Any, Any], ctx: CollectorContext, row: int) -> None:
        super().__init__(env)
        self._ctx, self._row = ctx, row
        self._leaves = leaves(env.observation_space)

    def checked(self, obs: Any, action: str) -> Any:
        for leaf in self._leaves:
            got = np.shape(leaf.get(obs))
            if got != leaf.shape:
                raise SchemaMismatchError(
                    f"{self._ctx.describe(self._row, None, leaf.field('obs'))}: {action}() gave shape {got}, expected "
                    f"{leaf.shape} as its observation space declares; mend the environment"
                )
        return obs

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        try:
            obs, info = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise fault(self._ctx, self._row, "reset", error) from error
        return self.checked(obs, "reset"), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            return self.env.step(action)
        except Exception as error:
            raise fault(self._ctx, self._row, "step", error) from error

    def close(self) -> None:
        try:
            self.env.close()
        except Exception as error:
            raise fault(self._ctx, self._row, "close", error) from error


class _SingleEnvs(SyncVectorEnv):
    """Steps single environments in same-step mode: every row of every slot is then a real transition, without a mask.

    Differs from SyncVectorEnv in what a collector has no use for, which is up to a fifth of a cheap step: no infos but
    ``final_obs`` are merged, and the arrays that ``step`` returns are its own, overwritten by the next.  The last
    observation of an episode is copied before the reset, so environments may reuse their buffer.
    """

    envs: list[_Named]  # type: ignore[assignment]

    def __init__(self, factories: Sequence[Callable[[], _Named]]) -> None:
        super().__init__(factories, copy=False, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        infos: dict[str, Any] = {}
        rewards, terminations, truncations = self._rewards, self._terminations, self._truncations
        for row, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions), strict=True)):
            obs, rewards[row], terminated, truncated, _ = env.step(action)
            env.checked(obs, "step")
            terminations[row], truncations[row] = terminated, truncated
            if terminated or truncated:
                infos.setdefault("final_obs", [None] * self.num_envs)[row] = deepcopy(obs)
                obs, _ = env.reset()
            self._env_obs[row] = obs
        self._observations = concatenate(self.single_observation_space, self._env_obs, self._observations)
        return self._observations, rewards, terminations, truncations, infos


def fault(ctx: CollectorContext, row: int | None, action: str, error: BaseException) -> CollectorError:
    """Return the error that names the environment which raised ``error`` in ``action``."""
    return ctx.error(f"the environment raised {type(error).__name__} in {action}(): {error}", row=row)


def _call(factory: Callable[..., Any], ctx: CollectorContext) -> Any:
    """Call a user's factory with what it can take: ``ctx`` by that name or as its one required argument,
    ``num_envs`` by name."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # Builtins and some C extensions have no signature.
        return factory()
    arguments: dict[str, Any] = {}
    if "num_envs" in parameters:
        arguments["num_envs"] = ctx.num_envs
    if "ctx" in parameters:
        return factory(ctx=ctx, **arguments)
    required = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in arguments
    ]
    return factory(ctx, **arguments) if len(required) == 1 else factory(**arguments)


def build(make_env: Any, ctx: CollectorContext, *, probe: bool = False) -> Any:
    """Return a vector environment of ``ctx.num_envs`` environments; see :class:`GymCollector` for what ``make_env``
    may be.

    ``probe``: the number of environments that the factory makes need not be ``ctx.num_envs``.
    """
    if isinstance(make_env, str):
        make_env = partial(gymnasium.make, make_env)
    if isinstance(make_env, Sequence):
        return _from_list(make_env, ctx, probe)
    if not callable(make_env):
        raise ConfigError(
            f"make_env: expected an environment id, a callable, or a list of callables, got {type(make_env).__name__} "
            f"{make_env!r}; environments are made in the collector's process, so give what makes them"
        )
    first = _call(make_env, ctx)
    if isinstance(first, gymnasium.vector.VectorEnv):
        if first.num_envs != ctx.num_envs and not probe:
            first.close()
            raise SchemaMismatchError(
                f"{ctx.name}: expected a vector environment of num_envs={ctx.num_envs} (its shard of "
                f"{ctx.total_num_envs}), got {first.num_envs}; let make_env take ctx or num_envs and build that many"
            )
        return first
    if not isinstance(first, gymnasium.Env):
        raise ConfigError(
            f"make_env: expected it to return a gymnasium.Env or a gymnasium.vector.VectorEnv, got "
            f"{type(first).__name__}; subclass gymnasium.vector.VectorEnv around it, or write a Collector of your own"
        )
    rest = [partial(_call, make_env, ctx) for _ in range(ctx.num_envs - 1)]
    return _sync([lambda: first, *rest], ctx)


def _from_list(factories: Sequence[Callable[..., Any]], ctx: CollectorContext, probe: bool) -> Any:
    if probe:
        mine = factories[:1]
    elif len(factories) == ctx.total_num_envs:
        mine = factories[ctx.env_offset : ctx.env_offset + ctx.num_envs]
    else:
        raise ConfigError(
            f"make_env: expected one factory for each of the num_envs={ctx.total_num_envs} environments of the run, "
            f"got {len(factories)}; one callable alone serves all of them"
        )
    return _sync([partial(_call, factory, ctx) for factory in mine], ctx)


def _sync(factories: Sequence[Callable[[], Any]], ctx: CollectorContext) -> Any:
    return _SingleEnvs([partial(_name, factory, ctx, row) for row, factory in enumerate(factories)])


def _name(factory: Callable[[], Any], ctx: CollectorContext, row: int) -> Any:
    return _Named(factory(), ctx, row)


def autoreset_mode(env: Any, declared: str | None) -> str:
    """Return the autoreset mode of a vector environment; ``declared`` where its metadata do not say."""
    mode = (env.metadata or {}).get("autoreset_mode") if declared is None else declared
    name = str(getattr(mode, "value", mode))
    if name not in _MODES:
        raise ConfigError(
            f"autoreset mode of {env!r}: expected its metadata['autoreset_mode'] to be one of {', '.join(_MODES)}, "
            f"got {mode!r}; "
            'say how it resets with autoreset_mode="NextStep", "SameStep" or "Disabled"'
        )
    return name


def takes_seed_list(env: Any) -> bool:
    """Only Gymnasium's own vector environments are known to take one seed each; others take one for all."""
    return isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)


def action_sampler(space: Any, num_envs: int, seed: int) -> Callable[[], Any]:
    """Return a callable that draws one batch of uniformly random actions from a generator of its own."""
    batch = batch_space(space, num_envs)
    batch.seed(seed)
    return batch.sample


def max_episode_steps(env: Any) -> int | None:
    spec: Any = getattr(env, "spec", None)
    if spec is None:
        envs: Sequence[Any] = getattr(env.unwrapped, "envs", ())
        spec = envs[0].spec if envs else None
    limit = getattr(spec, "max_episode_steps", None)
    return None if limit is None else int(limit)
