"""A learner that also keeps the episodes it took in, so that curves do not depend on when a log point was written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from numa_collectors.learner import Learner, LearnerContext

PATH_VARIABLE = "CONVERGENCE_EPISODES"


class RecordingLearner:
    """Passes everything on to ``learner`` and writes ``[env steps taken in, return]`` of each episode with its state.

    Needs the fields ``reward``, ``terminated`` and ``truncated``; an episode counts when the learner takes in its last step.
    """

    def __init__(self, learner: Learner, ctx: LearnerContext) -> None:
        self._learner = learner
        self._returns = [torch.zeros(num_envs, dtype=torch.float64) for num_envs in ctx.num_envs]
        self._env_steps = 0
        self._episodes: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        self._learner.ingest(rank, batch)
        done = (batch["terminated"].bool() | batch["truncated"].bool()).cpu()
        reward, returns = batch["reward"].double().cpu(), self._returns[rank]
        for slot in range(len(reward)):
            returns += reward[slot]
            self._env_steps += len(returns)
            self._episodes += [(self._env_steps, value) for value in returns[done[slot]].tolist()]
            returns[done[slot]] = 0.0

    def update(self, num_updates: int) -> Mapping[str, float]:
        return self._learner.update(num_updates)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._learner.weights()

    def state_dict(self) -> dict[str, Any]:
        Path(os.environ[PATH_VARIABLE]).write_text(json.dumps(self._episodes), encoding="utf-8")
        return self._learner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.load_state_dict(state)


def recording_motrix(ctx: LearnerContext, **options: Any) -> RecordingLearner:
    from motrix_fastsac.learner import MotrixLearner

    return RecordingLearner(MotrixLearner(ctx, **options), ctx)


def recording_fastsac(ctx: LearnerContext, **options: Any) -> RecordingLearner:
    from examples.fastsac.wiring import make_learner

    return RecordingLearner(make_learner(ctx, **options), ctx)


def curve(episodes: list[list[float]], num_envs: int, window: int = 100) -> list[tuple[int, float]]:
    """Return (iteration, mean return of the last ``window`` episodes) for every iteration since the first episode ended.

    An iteration is one step of all environments; this is what motrix logs as ``rollout/mean_return``.
    """
    points: list[tuple[int, float]] = []
    recent: list[float] = []
    position = 0
    last = int(episodes[-1][0]) // num_envs if episodes else 0
    for iteration in range(last + 1):
        while position < len(episodes) and episodes[position][0] <= iteration * num_envs:
            recent.append(episodes[position][1])
            position += 1
        recent = recent[-window:]
        if recent:
            points.append((iteration, sum(recent) / len(recent)))
    return points
