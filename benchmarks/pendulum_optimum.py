"""The best return that the example's pendulum allows, by dynamic programming: the scale on which evaluations are read.

    python -m benchmarks.pendulum_optimum        a few seconds on one core

The numpy pendulum of examples/motrix_fastsac (masses, motor and time step as in its MJCF) on a grid of angle and velocity,
bilinear between the nodes, backwards over the 200 steps of an episode; then forwards from its initial states.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

NUM_STEPS, NUM_ANGLES, NUM_VELOCITIES, MAX_VELOCITY = 200, 241, 241, 12.0
TORQUES = np.linspace(-1.0, 1.0, 11)
Policy = Callable[[int, np.ndarray, np.ndarray], np.ndarray]


def physics(angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
    """One step of the task: five of its simulation's."""
    for _ in range(5):
        force = 5.0 * torque - 9.81 * 1.05 * np.sin(angle) - 0.05 * velocity
        velocity = velocity + 0.01 * force / (1.0 + 0.1 / 3.0)
        angle = angle + 0.01 * velocity
    return angle, velocity


def reward(angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray | float) -> np.ndarray:
    """The task's reward, of the state after a step."""
    upright = 0.5 * (1.0 - np.cos(angle))
    return np.asarray(upright - 0.005 * np.minimum(velocity**2, 100.0) - 0.01 * np.square(torque))


def best_actions() -> list[np.ndarray]:
    """Return, for every number of steps that are left less one, the index of the best torque at each node of the grid."""
    angles = np.linspace(0.0, 2.0 * math.pi, NUM_ANGLES, endpoint=False)
    nodes = np.meshgrid(angles, np.linspace(-MAX_VELOCITY, MAX_VELOCITY, NUM_VELOCITIES), indexing="ij")
    moves = [_move(*nodes, torque) for torque in TORQUES]
    values, actions = np.zeros(NUM_ANGLES * NUM_VELOCITIES), []
    for _ in range(NUM_STEPS):
        after = np.stack([gain + sum(share * values[node] for node, share in corners) for gain, corners in moves])
        actions.append(after.argmax(0).astype(np.int8))
        values = after.max(0).ravel()
    return actions


def _move(
    angle: np.ndarray, velocity: np.ndarray, torque: float
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the reward of a torque at every node, and where it leads: four nodes with their shares."""
    angle, velocity = physics(angle, velocity, torque)
    row = angle % (2.0 * math.pi) / (2.0 * math.pi) * NUM_ANGLES
    column = np.clip((velocity + MAX_VELOCITY) / (2.0 * MAX_VELOCITY), 0.0, 1.0 - 1e-9) * (NUM_VELOCITIES - 1)
    low_row, low_column = np.floor(row).astype(int), np.floor(column).astype(int)
    corners = []
    for over_row, over_column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        share = abs(1 - over_row - (row - low_row)) * abs(1 - over_column - (column - low_column))
        corners.append(((low_row + over_row) % NUM_ANGLES * NUM_VELOCITIES + low_column + over_column, share))
    return reward(angle, velocity, torque), corners


def mean_return(policy: Policy, num_episodes: int = 1000) -> float:
    """Return the mean return of ``policy(step, angles, velocities) -> torques`` from the task's initial states."""
    rng = np.random.default_rng(0)
    angle, velocity = rng.uniform(-0.5, 0.5, num_episodes), rng.uniform(-0.1, 0.1, num_episodes)
    total = np.zeros(num_episodes)
    for step in range(NUM_STEPS):
        torque = policy(step, angle, velocity)
        angle, velocity = physics(angle, velocity, torque)
        total += reward(angle, velocity, torque)
    return float(total.mean())


def bounds() -> tuple[float, float]:
    """Return the mean returns of uniform torques and of the best ones."""
    actions, rng = best_actions(), np.random.default_rng(1)

    def best(step: int, angle: np.ndarray, velocity: np.ndarray) -> np.ndarray:
        row = np.rint(angle % (2.0 * math.pi) / (2.0 * math.pi) * NUM_ANGLES).astype(int) % NUM_ANGLES
        column = np.rint((velocity + MAX_VELOCITY) / (2.0 * MAX_VELOCITY) * (NUM_VELOCITIES - 1)).astype(int)
        chosen = actions[NUM_STEPS - 1 - step][row, np.clip(column, 0, NUM_VELOCITIES - 1)]
        return np.asarray(TORQUES[chosen])

    return mean_return(lambda step, angle, velocity: rng.uniform(-1.0, 1.0, len(angle))), mean_return(best)


if __name__ == "__main__":
    print("uniform torques {:.1f}, best torques {:.1f}".format(*bounds()))
