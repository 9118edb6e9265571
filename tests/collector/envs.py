"""Environments and policies for the tests; importable by spawned processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from numa_collectors.collector import Collector, CollectorContext, GymSpec
from numa_collectors.rings import Schema

DISCOUNT = 0.9
LOOP, EXIT = 4, 3  # lengths of the two branches of Chain


class Chain(gymnasium.Env[np.ndarray, int]):
    """Two branches, observed one-hot: one runs into a state that pays 1 for ever, the other ends after EXIT steps with 1.

    Nothing but a time limit ends the first, so its values are those of the endless chain.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (LOOP + EXIT,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._state = 0

    def _obs(self) -> np.ndarray:
        obs = np.zeros(LOOP + EXIT, np.float32)
        obs[self._state] = 1.0
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._state = int(self.np_random.choice([0, LOOP]))
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._state < LOOP:
            reward = float(self._state == LOOP - 1)
            self._state = min(self._state + 1, LOOP - 1)
            return self._obs(), reward, False, False, {}
        ended = self._state == LOOP + EXIT - 1
        self._state = self._state if ended else self._state + 1
        return self._obs(), float(ended), ended, False, {}


def chain_values() -> np.ndarray:
    """Return the value of each state of Chain in closed form."""
    loop = [DISCOUNT ** (LOOP - 1 - i) / (1 - DISCOUNT) for i in range(LOOP)]
    return np.array(loop + [DISCOUNT ** (EXIT - 1 - i) for i in range(EXIT)])


def limited_chain() -> gymnasium.Env[Any, Any]:
    return gymnasium.wrappers.TimeLimit(Chain(), 12)


def chain_vector(num_envs: int, mode: str = "SameStep") -> SyncVectorEnv:
    return SyncVectorEnv([limited_chain] * num_envs, autoreset_mode=AutoresetMode(mode))


def chain_next(num_envs: int) -> SyncVectorEnv:
    return chain_vector(num_envs, "NextStep")


def chain_disabled(num_envs: int) -> SyncVectorEnv:
    return chain_vector(num_envs, "Disabled")


class Counter(gymnasium.Env[Any, Any]):
    """Observes [seed-dependent id, steps since reset], in one buffer that it reuses; ends after ``length`` steps."""

    def __init__(
        self, length: int = 5, *, fault: str | None = None, at: int = 3, limit: float = 1.0, copying: bool = False
    ) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(-limit, limit, (1,), np.float32)
        self._buffer = np.zeros(2)
        self._length, self._fault, self._at, self._copying = length, fault, at, copying
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fault == "reset":
            raise RuntimeError("cannot reset")
        self._buffer[:] = (self.np_random.random(), 0)
        return self._buffer.copy() if self._copying else self._buffer, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self._buffer[1] += 1
        reward = float(self._buffer[1])
        obs: Any = self._buffer.copy() if self._copying else self._buffer
        if self._fault is not None and self._buffer[1] == self._at:
            if self._fault == "step":
                raise RuntimeError("cannot step")
            if self._fault == "shape":
                obs = np.zeros(3)
            if self._fault == "nan_obs":
                obs = np.array([np.nan, 1.0])
            if self._fault == "inf_reward":
                reward = float("inf")
        return obs, reward, bool(self._buffer[1] == self._length), False, {}

    def close(self) -> None:
        if self._fault == "close":
            raise RuntimeError("cannot close")


class Nested(gymnasium.Env[Any, Any]):
    """Dict of an image, a Tuple and a Discrete: leaves of every kind."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
                "arm": spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(5))),
                "flags": spaces.MultiBinary(3),
            }
        )
        self.action_space = spaces.MultiDiscrete([3, 4])
        self._steps = 0

    def _obs(self) -> dict[str, Any]:
        return {
            "camera": np.full((4, 4, 3), 200 + self._steps, np.uint8),
            "arm": (np.full(2, self._steps / 10), self._steps % 5),
            "flags": np.array([1, 0, self._steps % 2], np.int8),
        }

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._steps += 1
        return self._obs(), 1.0, False, self._steps == 3, {}


class Constant:
    """A policy that gives ``value`` in the action's dtype and counts what it is given."""

    def __init__(self, ctx: CollectorContext, spec: GymSpec, value: float = 0.0) -> None:
        self.value, self.spec, self.num_envs = value, spec, ctx.num_envs
        self.seen: list[Any] = []
        self.versions: list[int] = []

    def act(self, obs: Any) -> np.ndarray:
        self.seen.append({k: v.copy() for k, v in obs.items()} if isinstance(obs, Mapping) else obs.copy())
        return np.full((self.num_envs, *self.spec.action.shape), self.value, self.spec.action.dtype)

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self.versions.append(version)


def slot_of(schema: Schema, num_envs: int) -> dict[str, np.ndarray]:
    """Return a slot outside of any ring, full of rubbish."""
    return {field.name: np.full((num_envs, *field.shape), 77).astype(field.dtype) for field in schema.fields}


class Numbered(Collector):
    """Writes the number of its own calls; no environment."""

    def __init__(self, ctx: CollectorContext, fault: str | None = None) -> None:
        self.ctx, self.fault, self.calls = ctx, fault, 0
        self.versions: list[int] = []
        self.closed = False

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        with self.ctx.timer("env_step"):
            self.calls += 1
        if self.fault == "raise" and self.calls == 3:
            raise ValueError("broken on purpose")
        slot["obs"][...] = self.calls
        if self.fault != "forget":
            slot["reward"][...] = 1.0
        if self.fault == "nan" and self.calls == 3:
            slot["obs"][1, 0] = np.nan

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self.versions.append(version)

    def close(self) -> None:
        self.closed = True
        if self.fault == "close":
            raise OSError("cannot close")
