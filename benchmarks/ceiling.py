"""What a second process of real work adds on this machine when nothing is shared: no library can scale beyond it."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Ceiling"]

_BATCH = 20


def _step(pipe: Connection, task: str, cpu: int) -> None:
    """Step one environment on ``cpu`` for as many seconds as each message says; answer with steps a second."""
    import gymnasium

    os.sched_setaffinity(0, {cpu})
    env: Any = gymnasium.make(task)
    env.reset(seed=cpu)
    action = env.action_space.sample()
    while (seconds := pipe.recv()) is not None:
        count, begin_s = 0, time.perf_counter()
        while time.perf_counter() - begin_s < seconds:
            for _ in range(_BATCH):
                _, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    env.reset()
            count += _BATCH
        pipe.send(count / (time.perf_counter() - begin_s))


class Ceiling:
    """Two processes that step a Gymnasium task, each on a CPU of its own.  A context manager."""

    def __init__(self, task: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for cpu in sorted(os.sched_getaffinity(0))[:2]:
            pipe, theirs = context.Pipe()
            self._pipes.append(pipe)
            self._processes.append(context.Process(target=_step, args=(theirs, task, cpu), daemon=True))
        if len(self._processes) < 2:
            raise RuntimeError("a second process needs a second CPU, and this one may use one only")
        for process in self._processes:
            process.start()

    def ratio(self, seconds: float = 3.0) -> float:
        """Return the steps a second of both at once over those of the first alone."""
        return sum(self._rates(self._pipes, seconds)) / sum(self._rates(self._pipes[:1], seconds))

    def _rates(self, pipes: list[Connection], seconds: float) -> list[float]:
        for pipe in pipes:
            pipe.send(seconds)
        return [pipe.recv() for pipe in pipes]

    def __enter__(self) -> Ceiling:
        self._rates(self._pipes, 0.1)  # imports are over when both have answered
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
