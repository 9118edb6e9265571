"""The collector's process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from numa_collectors.binding import BindRequest
from numa_collectors.collector.context import CollectorContext, CollectorFactory, check_picklable
from numa_collectors.collector.loop import CollectorLoop, CollectorOptions, build_loop
from numa_collectors.rings import TransitionRing
from numa_collectors.seeds import seed_everything
from numa_collectors.snapshots import WeightSnapshot
from numa_collectors.worker import Launcher, PinnedWorker

__all__ = ["CollectorWorker"]

# How soon a stop request is seen while the ring is full, and how often statistics leave.
_WAIT_S = 0.2
_STATS_INTERVAL_S = 0.1


class CollectorWorker(PinnedWorker):
    """Runs a :class:`CollectorLoop` in a process of its own, born bound; statistics are those of
    :meth:`CollectorLoop.stats`.

    factory: picklable callable ``(ctx) -> Collector``, called in the process.  Refused here, before any process
        starts, where it cannot be pickled.
    ctx: what it is called with, as built for generation 0; a successor gets the next generation's seed and goes on
        at the slot that its ring has committed.  ``ctx.cpus`` left None is filled in from ``bind``.
    ring, snapshot: handles, opened in the process; ``snapshot`` None: a collector without weights.
    quota_slots: callable that travels to the process (it may hold a shared region), is asked before every slot and wins
        over ``options.quota_slots``.

    The process seeds ``random``, numpy and torch with ``ctx.seed`` before it calls the factory, and torch once more
    after it if it was the factory that imported torch.  The ring is closed when the quota is reached or a stop was
    asked for, and not after an error: the next generation takes over.
    """

    def __init__(
        self,
        factory: CollectorFactory,
        ctx: CollectorContext,
        ring: TransitionRing,
        snapshot: WeightSnapshot | None,
        options: CollectorOptions | None = None,
        *,
        quota_slots: Callable[[], int | None] | None = None,
        bind: BindRequest | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        check_picklable(factory, "the collector factory")
        super().__init__(role="collector", rank=ctx.rank, generation=ctx.generation, bind=bind, launcher=launcher)
        self._factory = factory
        self._ctx = ctx
        self._ring = ring
        self._snapshot = snapshot
        self._options = options
        self._quota_slots = quota_slots
        self._loop: CollectorLoop | None = None
        self._failed = False
        self._next_stats_s = 0.0

    def setup(self) -> None:
        ctx = self._ctx.restarted(self.generation)
        if ctx.cpus is None and self.bind.cpus is not None:
            ctx = replace(ctx, cpus=self.bind.cpus)
        seed_everything(ctx.seed)
        had_torch = "torch" in sys.modules
        self._loop = build_loop(
            self._factory,
            ctx,
            self._ring,
            self._snapshot,
            self._options,
            quota_slots=self._quota_slots,
            waiting=self.waiting,
        )
        if not had_torch and "torch" in sys.modules:
            # A torch that nobody seeded draws the same numbers in every collector.
            seed_everything(ctx.seed)

    def step(self) -> bool:
        loop = self._running()
        try:
            loop.run_once(_WAIT_S)
        except BaseException:
            self._failed = True
            raise
        now_s = time.monotonic()
        if now_s >= self._next_stats_s:
            self._next_stats_s = now_s + _STATS_INTERVAL_S
            self.post_stats(loop.stats())
        return loop.finished

    def teardown(self) -> None:
        loop = self._running()
        self.post_stats(loop.stats())
        try:
            if not self._failed:
                loop.finish()
        finally:
            loop.close()

    def _running(self) -> CollectorLoop:
        if self._loop is None:
            raise RuntimeError(f"{self.name}: setup() has not run")
        return self._loop
