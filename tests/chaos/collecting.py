"""A collector that ends its own process at a planned point.  Imports no torch, so that its processes start fast."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from numa_collectors.collector import Collector, CollectorContext
from numa_collectors.rings import Producer
from numa_collectors.snapshots import SnapshotReader
from tests.chaos.payload import HalfCopy, check_weights, die, fill

__all__ = ["ChaosCollector", "planned_end"]

_POINTS = (
    "in its construction",
    "slot reserved",
    "slot half-written",
    "slot written, not committed",
    "slot committed",
    "within a load of weights",
    "weights loaded",
)
# Slots of a generation before its planned end, at most.
_MOST_STEPS = 25


def planned_end(seed: int, rank: int, generation: int, num_generations: int) -> tuple[str, int] | None:
    """Return where a generation ends itself, and in which step (or load) of it; None: nowhere."""
    if generation >= num_generations:
        return None
    rng = random.Random(f"{seed} {rank} {generation}")
    # The first generation's construction is part of the run's start, which nothing survives.
    return rng.choice(_POINTS if generation else _POINTS[1:]), rng.randrange(_MOST_STEPS)


class ChaosCollector(Collector):
    """Fills slots with counters; each of its first ``num_generations`` ends by SIGKILL where :func:`planned_end` says."""

    def __init__(
        self,
        ctx: CollectorContext,
        *,
        seed: int,
        num_generations: int,
        delays_s: tuple[float, ...],
        numbered: bool = True,
    ) -> None:
        self._ctx = ctx
        self._numbered = numbered
        self._step = 0
        self._version = 0
        self._num_loads = 0
        self._delay_s = delays_s[ctx.rank]
        self._point, self._at = planned_end(seed, ctx.rank, ctx.generation, num_generations) or ("", -1)
        if self._point == "in its construction":
            die()
        if self._point == "slot written, not committed":
            _die_around(Producer, "commit", self._at, before=True)
        if self._point == "slot committed":
            _die_around(Producer, "commit", self._at, before=False)
        if self._point == "within a load of weights":
            _die_within_a_load(self._at // 5)

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        check_weights(weights, version, self._version, numbered=self._numbered)
        self._version = version
        self._num_loads += 1
        if self._point == "weights loaded" and self._num_loads > self._at // 5:
            die()

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self._delay_s:
            time.sleep(self._delay_s)
        if self._step == self._at and self._point == "slot reserved":
            die()
        serial = self._ctx.start_slot + self._step
        half = self._step == self._at and self._point == "slot half-written"
        fill(slot, self._ctx.rank, self._ctx.generation, self._step, serial, half=half)
        if half:
            die()
        self._step += 1


def _die_around(owner: type, name: str, calls: int, *, before: bool) -> None:
    """Have the process end before or after the method ``name`` was called once more than ``calls`` times."""
    method: Callable[..., Any] = getattr(owner, name)
    done = [0]

    def counting(*args: Any, **options: Any) -> Any:
        done[0] += 1
        if before and done[0] > calls:
            die()
        result = method(*args, **options)
        if done[0] > calls:
            die()
        return result

    setattr(owner, name, counting)


def _die_within_a_load(loads: int) -> None:
    """Have the process end when half of the weights are copied, in a load after ``loads`` others."""
    copy = SnapshotReader._copy
    done = [0]

    def counting(reader: SnapshotReader, slot: int, target: Any, counter: int, expected: int) -> bool:
        done[0] += 1
        return copy(reader, slot, HalfCopy(target) if done[0] > loads else target, counter, expected)

    SnapshotReader._copy = counting  # type: ignore[method-assign]
