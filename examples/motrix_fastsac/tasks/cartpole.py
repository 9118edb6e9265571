"""A pole balanced on a cart: +1 a step, 500 steps at most, ends when the pole falls or the cart leaves the track."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
from motrix_env_core import registry
from motrix_env_core.array.env import ArrayEnvState, NpObs
from motrix_env_core.config import SimCfg, configclass
from motrix_env_core.config.scene import SceneCfg
from motrix_env_core.direct.env import DirectEnv, DirectEnvCfg
from motrix_env_core.sim.read import JointPositionQuery, JointVelocityQuery
from motrix_env_core.sim.write import CtrlTargetsWrite, JointPositionWrite, JointVelocityWrite

_XML = Path(__file__).with_name("cartpole.xml")
_JOINTS = ("slider", "hinge")
_MAX_POSITION, _MAX_ANGLE = 2.4, 0.4


@configclass
class CartpoleCfg(DirectEnvCfg):
    """Cart-pole balance."""

    scene: SceneCfg = SceneCfg(file=str(_XML))
    sim: SimCfg = SimCfg(dt=0.01)
    max_episode_seconds: float = 10.0
    ctrl_dt: float = 0.02


class CartpoleEnv(DirectEnv[CartpoleCfg]):
    """The cart-pole in motrixsim: observation ``(position, angle)`` and their velocities, action one force in -1..1."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, cfg: CartpoleCfg, num_envs: int = 1, backend: str | None = None) -> None:
        super().__init__(cfg, num_envs, backend)
        self._reads = self.sim.compile_reads(
            {"position": JointPositionQuery(joints=_JOINTS), "velocity": JointVelocityQuery(joints=_JOINTS)}
        )
        self._drive = self.sim.compile_writes({"push": CtrlTargetsWrite(("push",))})
        self._start = self.sim.compile_writes(
            {"position": JointPositionWrite(_JOINTS), "velocity": JointVelocityWrite(_JOINTS)}, reset=True
        )

    def apply_action(self, actions: np.ndarray, state: ArrayEnvState) -> ArrayEnvState:
        self._drive.buffer("push")[:] = actions
        self._drive.execute()
        return state

    def compute_transition(self, state: ArrayEnvState) -> ArrayEnvState:
        self._reads.execute()
        position = self._reads["position"]
        state.terminated[:] = (np.abs(position[:, 0]) > _MAX_POSITION) | (np.abs(position[:, 1]) > _MAX_ANGLE)
        state.reward[:] = 1.0
        return state

    def reset(self, env_ids: np.ndarray) -> None:
        shape = (len(env_ids), len(_JOINTS))
        self._start.buffer("position")[env_ids] = np.random.uniform(-0.05, 0.05, shape)
        self._start.buffer("velocity")[env_ids] = np.random.uniform(-0.05, 0.05, shape)
        self._start.execute(env_ids)
        self._reads.execute(env_ids)

    def compute_observation(self, state: ArrayEnvState) -> ArrayEnvState:
        obs = np.concatenate([self._reads["position"], self._reads["velocity"]], axis=1).astype(np.float32)
        return state.replace(obs=NpObs(obs))


def register() -> None:
    """Register ``cartpole-ms``."""
    registry.register_env_config("cartpole-ms", CartpoleCfg)
    registry.register_env("cartpole-ms", CartpoleEnv)
