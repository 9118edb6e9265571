"""While a collector's replacement is not there yet the learner goes on: the replacement comes only once it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from numa_collectors.learner import LearnerContext
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.trainer import FanOutTrainer
from tests.trainer.replaced import PATIENCE_S, Replaced
from tests.trainer.toys import SCHEMA, WEIGHTS, CountingLearner, toy_config


class Progress:
    """Lets the replacement start once ``num_updates`` were made after the death."""

    def __init__(self, died: Path, may_start: Path, num_updates: int) -> None:
        self.died, self.may_start, self.left = died, may_start, num_updates

    def __call__(self, num_updates: int) -> None:
        if self.died.exists():
            self.left -= num_updates
            if self.left <= 0:
                self.may_start.touch()


class GoesOn(CountingLearner):
    """Says after its updates that there has been progress."""

    def __init__(self, ctx: LearnerContext, *, progress: Callable[[int], None]) -> None:
        super().__init__(ctx)
        self.progress = progress

    def update(self, num_updates: int) -> dict[str, float]:
        metrics = super().update(num_updates)
        self.progress(num_updates)
        return metrics


def test_the_learner_makes_updates_before_the_replacement_of_a_dead_collector_starts(tmp_path: Path) -> None:
    files = {"died": tmp_path / "died", "may_start": tmp_path / "may-start"}
    result = FanOutTrainer(
        toy_config(tmp_path / "run", on_collector_exit="restart", restart_backoff_s=0.0, start_timeout_s=PATIENCE_S),
        collector=partial(Replaced, **files),
        learner=partial(GoesOn, progress=Progress(**files, num_updates=40)),
        schema=SCHEMA,
        weights=WEIGHTS,
    ).run()
    assert (result.status, result.env_steps, result.num_restarts) == ("finished", 700, 1)


def test_a_loop_of_ones_own_makes_progress_before_the_replacement_starts(tmp_path: Path) -> None:
    files: dict[str, Any] = {"died": tmp_path / "died", "may_start": tmp_path / "may-start"}
    progress = Progress(**files, num_updates=40)
    options = PoolOptions(
        num_envs=2, num_collectors=2, quota_slots=100, on_collector_exit="restart", restart_backoff_s=0.0
    )
    seen: list[list[int]] = [[], []]
    with CollectorPool(
        partial(Replaced, **files), schema=SCHEMA, weights=WEIGHTS, options=options, on_message=lambda text: None
    ) as pool:
        pool.publish({"w": torch.zeros(4), "count": torch.tensor(0)})
        for rank, span in pool.spans(max_slots=1, timeout_s=PATIENCE_S):
            seen[rank] += pool.tensors(rank, span)["serial"][:, 0].tolist()
            progress(1)
        assert pool.num_restarts == 1
    assert seen == [list(range(100))] * 2
