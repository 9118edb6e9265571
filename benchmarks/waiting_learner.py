"""FastSAC's run on a MuJoCo task with a learner whose updates take a device's time and next to no CPU time.

    python -m benchmarks.waiting_learner --update-ms 20 num_collectors=2 run_dir=/tmp/run

A stand-in for a learner that has a device of its own, for machines without one: an update waits as the host waits for a
device, and nothing is learnt.  Environments, acting, rings, replay memory, normaliser, publishing and metrics are the real
ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from examples.fastsac.learner import FastSACLearner
from examples.fastsac.train import TASKS
from examples.fastsac.wiring import wire
from numa_collectors.config import load_config
from numa_collectors.learner import LearnerContext
from numa_collectors.trainer import FanOutTrainer

TASK = "HalfCheetah-v5"


class WaitingLearner:
    """Passes everything on to ``learner``, except that an update is a wait of ``update_s`` seconds."""

    def __init__(
        self, ctx: LearnerContext, *, make: Callable[[LearnerContext], FastSACLearner], update_s: float
    ) -> None:
        self._learner = make(ctx)
        self._update_s = update_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def ingest(self, rank: int, batch: Mapping[str, Tensor]) -> None:
        self._learner.ingest(rank, batch)

    def update(self, num_updates: int) -> Mapping[str, float]:
        time.sleep(num_updates * self._update_s)
        return {}

    def weights(self) -> Mapping[str, Tensor]:
        return self._learner.weights()

    def state_dict(self) -> dict[str, Any]:
        return self._learner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._learner.load_state_dict(state)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waiting_learner")
    parser.add_argument("--update-ms", type=float, default=20.0)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of RunConfig")
    arguments = parser.parse_args(argv)
    wiring = wire(TASK, TASKS[TASK].algorithm)
    trainer = FanOutTrainer(
        load_config(TASKS[TASK].run, overrides=arguments.overrides),
        collector=wiring.collector,
        learner=partial(WaitingLearner, make=wiring.learner, update_s=arguments.update_ms / 1e3),
        schema=wiring.schema,
        weights=wiring.weights,
    )
    return trainer.run().exit_code


if __name__ == "__main__":
    sys.exit(main())
