"""A pendulum that its motor is too weak to lift at once: it has to swing up.  200 steps an episode, no termination.

Observation ``(cos, sin, velocity / 8)`` of the angle from upright, action one torque in -1..1, reward at most 1 a step.
For experiments, ``PENDULUM_STEP_MS`` makes every step of a process take so much longer, asleep, and
``PENDULUM_STEP_CPU_MS`` every step of one environment, at work.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from motrix_env_core import registry
from motrix_env_core.array.env import ArrayEnv, ArrayEnvState, NpObs
from motrix_env_core.config import SimCfg, configclass
from motrix_env_core.config.scene import SceneCfg
from motrix_env_core.direct.env import DirectEnv, DirectEnvCfg
from motrix_env_core.sim.read import JointPositionQuery, JointVelocityQuery
from motrix_env_core.sim.write import CtrlTargetsWrite, JointPositionWrite, JointVelocityWrite

_XML = Path(__file__).with_name("pendulum.xml")
_MAX_VELOCITY = 8.0
_EXTRA_STEP_S = float(os.environ.get("PENDULUM_STEP_MS", "0")) / 1e3
_EXTRA_CPU_S = float(os.environ.get("PENDULUM_STEP_CPU_MS", "0")) / 1e3
# Of the numpy pendulum: the same masses and motor as in the MJCF.
_TORQUE, _DAMPING = 5.0, 0.05
_INERTIA = 1.0 + 0.1 / 3.0
_GRAVITY_TORQUE = 9.81 * (1.0 + 0.05)


@configclass
class PendulumCfg(DirectEnvCfg):
    """Torque-limited pendulum swing-up."""

    scene: SceneCfg = SceneCfg(file=str(_XML))
    sim: SimCfg = SimCfg(dt=0.01)
    max_episode_seconds: float = 10.0
    ctrl_dt: float = 0.05


class _Task:
    """Spaces, observation and reward; angles are measured from hanging down, as the joint is."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    @staticmethod
    def observe(angle: np.ndarray, velocity: np.ndarray) -> NpObs:
        return NpObs(np.stack([-np.cos(angle), -np.sin(angle), velocity / _MAX_VELOCITY], axis=1).astype(np.float32))

    @staticmethod
    def terms(angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "upright": 0.5 * (1.0 - np.cos(angle)),
            "velocity": -0.005 * np.minimum(velocity**2, 100.0),
            "torque": -0.01 * torque**2,
        }

    @staticmethod
    def draw(num: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw initial angles and velocities, near hanging down, from numpy's global generator (motrix seeds that)."""
        return np.random.uniform(-0.5, 0.5, num), np.random.uniform(-0.1, 0.1, num)

    def finish(
        self, state: ArrayEnvState, angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray
    ) -> ArrayEnvState:
        if _EXTRA_STEP_S:
            time.sleep(_EXTRA_STEP_S)
        end_s = time.process_time() + _EXTRA_CPU_S * len(angle)
        while _EXTRA_CPU_S and time.process_time() < end_s:
            pass
        terms = self.terms(angle, velocity, torque)
        reward = sum(terms.values(), np.zeros(len(angle)))
        state.reward[:] = reward
        return state.replace(reward_terms=terms, metrics={"height": -np.cos(angle)})


class PendulumEnv(DirectEnv[PendulumCfg], _Task):
    """The pendulum in motrixsim."""

    observation_space = _Task.observation_space
    action_space = _Task.action_space

    def __init__(self, cfg: PendulumCfg, num_envs: int = 1, backend: str | None = None) -> None:
        super().__init__(cfg, num_envs, backend)
        hinge = ("hinge",)
        self._reads = self.sim.compile_reads(
            {"angle": JointPositionQuery(joints=hinge), "velocity": JointVelocityQuery(joints=hinge)}
        )
        self._drive = self.sim.compile_writes({"torque": CtrlTargetsWrite(("torque",))})
        self._start = self.sim.compile_writes(
            {"angle": JointPositionWrite(hinge), "velocity": JointVelocityWrite(hinge)}, reset=True
        )

    def apply_action(self, actions: np.ndarray, state: ArrayEnvState) -> ArrayEnvState:
        self._drive.buffer("torque")[:] = actions
        self._drive.execute()
        return state

    def compute_transition(self, state: ArrayEnvState) -> ArrayEnvState:
        self._reads.execute()
        return self.finish(
            state, self._reads["angle"][:, 0], self._reads["velocity"][:, 0], self._drive.buffer("torque")[:, 0]
        )

    def reset(self, env_ids: np.ndarray) -> None:
        angle, velocity = self.draw(len(env_ids))
        self._start.buffer("angle")[env_ids, 0] = angle
        self._start.buffer("velocity")[env_ids, 0] = velocity
        self._start.execute(env_ids)
        self._reads.execute(env_ids)

    def compute_observation(self, state: ArrayEnvState) -> ArrayEnvState:
        return state.replace(obs=self.observe(self._reads["angle"][:, 0], self._reads["velocity"][:, 0]))


class _TextRenderer:
    """Shows the first pendulum as one line a step, and ends with its episode."""

    def __init__(self, env: PendulumNumpyEnv) -> None:
        self._env, self._steps = env, 0

    def render(self) -> bool:
        self._steps += 1
        height = float(self._env.state.metrics["height"][0])
        print(f"{self._steps:4d} {height:+.3f} {'#' * round(20 * (height + 1.0))}")
        return self._steps < (self._env.cfg.max_episode_steps or 0)

    def close(self) -> None:
        pass


class PendulumNumpyEnv(ArrayEnv[PendulumCfg], _Task):
    """The same pendulum without a simulator, semi-implicit Euler at the same time step."""

    observation_space = _Task.observation_space
    action_space = _Task.action_space

    def __init__(self, cfg: PendulumCfg, num_envs: int = 1) -> None:
        super().__init__(cfg, num_envs)
        self._angle, self._velocity, self._torque = np.zeros((3, num_envs))

    def create_renderer(self, config: object) -> _TextRenderer:
        return _TextRenderer(self)

    def apply_action(self, actions: np.ndarray, state: ArrayEnvState) -> ArrayEnvState:
        self._torque = actions[:, 0].astype(np.float64)
        return state

    def physics_step(self) -> None:
        for _ in range(self._cfg.sim_substeps):
            force = _TORQUE * self._torque - _GRAVITY_TORQUE * np.sin(self._angle) - _DAMPING * self._velocity
            self._velocity += self._cfg.sim.dt * force / _INERTIA
            self._angle += self._cfg.sim.dt * self._velocity

    def compute_transition(self, state: ArrayEnvState) -> ArrayEnvState:
        return self.finish(state, self._angle, self._velocity, self._torque)

    def reset(self, env_ids: np.ndarray) -> None:
        self._angle[env_ids], self._velocity[env_ids] = self.draw(len(env_ids))

    def compute_observation(self, state: ArrayEnvState) -> ArrayEnvState:
        return state.replace(obs=self.observe(self._angle, self._velocity))


def register() -> None:
    """Register ``pendulum-ms`` and ``pendulum-np``."""
    for name, env in (("pendulum-ms", PendulumEnv), ("pendulum-np", PendulumNumpyEnv)):
        registry.register_env_config(name, PendulumCfg)
        registry.register_env(name, env)
