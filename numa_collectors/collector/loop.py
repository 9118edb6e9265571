"""The collector's loop: weights in, one slot out.  The same object runs in a worker and inline.

*Guarantees.*  Nothing is acted on before the first version of the weights arrived.  A slot is committed only when
the collector wrote it to the end and it passed the checks, with the version that acted.  Nothing is dropped: while
the ring is full the environment is not stepped.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import FrameType

import numpy as np

from numa_collectors.collector.checks import FiniteCheck, first_observation_digests
from numa_collectors.collector.context import Collector, CollectorContext, CollectorFactory
from numa_collectors.errors import ConfigError, NumaCollectorsError, RingClosedError
from numa_collectors.rings import Producer, TransitionRing
from numa_collectors.snapshots import SnapshotReader, WeightSnapshot

__all__ = ["CollectorLoop", "CollectorOptions", "build_loop"]

# Between two looks for the first weights; afterwards weights are never waited for.
_FIRST_WEIGHTS_POLL_S = 0.002
# Between two looks at what the consumer has taken, while too much that is too old waits for it.
_PACING_POLL_S = 0.001
# Between two looks at a quota that was reached; nothing waits for a collector then.
_IDLE_S = 0.02


@dataclass(frozen=True)
class CollectorOptions:
    """How a collector's loop runs.

    weight_poll_interval: slots between two looks for newer weights; the first look is before the first slot.
    quota_slots: slots that this collector shall have committed in all, earlier generations included; None: without end.
    check_finite: check every floating-point field of every slot for NaN and infinities.
    max_policy_lag: versions by which the weights that acted may be behind the newest published ones.  Beyond, newer ones are
        loaded before acting, whatever ``weight_poll_interval`` says, and while the oldest slot that the consumer has not
        taken yet is that old, the environment is not stepped.  Nothing is dropped.  None: no bound.
    idle_at_quota: stay alive, and the ring open, when the quota is reached, since it may still be raised; otherwise end.
    """

    weight_poll_interval: int = 1
    quota_slots: int | None = None
    check_finite: bool = True
    max_policy_lag: int | None = None
    idle_at_quota: bool = False

    def __post_init__(self) -> None:
        if self.weight_poll_interval < 1:
            raise ConfigError(f"weight_poll_interval: expected at least 1 slot, got {self.weight_poll_interval}")
        if self.quota_slots is not None and self.quota_slots < 0:
            raise ConfigError(f"quota_slots: expected at least 0 slots, or None for no end, got {self.quota_slots}")


class CollectorLoop:
    """Takes one step of the collector at a time: :meth:`run_once`.

    ``reader`` is None for a collector without weights; version 0 is then committed.  ``waiting`` is entered while
    the loop is blocked on purpose (no weights yet, no space), so that a watchdog does not take it for hung.
    ``quota_slots``, where given, is asked before every slot and wins over the option; once it was reached the ring
    is closed and it cannot grow again.  ``released`` returns how many slots the consumer has taken; ``max_policy_lag``
    needs it to know what is unread.
    """

    def __init__(
        self,
        collector: Collector,
        producer: Producer,
        reader: SnapshotReader | None,
        ctx: CollectorContext,
        options: CollectorOptions | None = None,
        *,
        quota_slots: Callable[[], int | None] | None = None,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        released: Callable[[], int] | None = None,
    ) -> None:
        self._collector = collector
        self._producer = producer
        self._reader = reader
        self._ctx = ctx
        self._options = CollectorOptions() if options is None else options
        self._quota_slots = quota_slots
        self._waiting = waiting
        self._finite = FiniteCheck(ctx) if self._options.check_finite else None
        self._since_poll = 0
        self._version = 0
        self._released = released if self._options.max_policy_lag is not None else None
        # (number of the slot, version) wherever the version changed, from the oldest unread slot on.
        self._unread: deque[tuple[int, int]] = deque()
        self._digests: list[int] = []
        self._counters: dict[str, int | float] = dict.fromkeys(
            (
                "slots",
                "env_steps",
                "masked_env_steps",
                "episodes",
                "return_sum",
                "length_sum",
                "weight_loads",
                "collect_ns",
                "push_ns",
                "sync_ns",
                "wait_space_ns",
                "check_s",
                "wait_weights_s",
            ),
            0,
        )
        self.finished = False
        """True once the quota is reached or the consumer closed the ring; :meth:`run_once` then does nothing."""

    @property
    def version(self) -> int:
        """Version of the weights that act; 0 before the first."""
        return self._version

    @property
    def ctx(self) -> CollectorContext:
        return self._ctx

    def run_once(self, timeout_s: float | None = None) -> bool:
        """Commit one slot and return True; False when it took longer than ``timeout_s`` to wait for weights or
        space, or at the end.

        ``timeout_s`` bounds each of the two waits (None: without limit; 0: do not wait), not the environment.
        Raises what the collector raises, :class:`NonFiniteError`, and PeerLostError when the consumer died; the slot
        is then not committed.
        """
        if self.finished:
            return False
        if self._quota_reached():
            self._rest(timeout_s)
            return False
        try:
            # Space first, weights second: what acts are the weights of now, not those from before a wait for space.
            slot = self._reserve(timeout_s)
            if slot is None or not self._wait_for_learner(timeout_s):
                return False
        except RingClosedError:
            # The consumer wants nothing more: an orderly end, not a failure of this collector.
            self.finish()
            return False
        if not self._have_weights(timeout_s):
            return False
        arrays = dict(slot)
        del slot
        try:
            self._collect(arrays)
        except BaseException as error:
            arrays.clear()
            _drop_views(error, sys._getframe())
            raise
        return True

    def _rest(self, timeout_s: float | None) -> None:
        """Do what the options say about a quota that is reached."""
        if not self._options.idle_at_quota:
            self.finish()
        elif timeout_s != 0:
            with self._waiting():
                time.sleep(_IDLE_S if timeout_s is None else min(timeout_s, _IDLE_S))

    def finish(self) -> None:
        """End in an orderly way: close the producer's side, which tells the consumer that nothing more comes.
        Idempotent.

        Not to be called after an error: an unclosed ring is taken over by the next generation.
        """
        self.finished = True
        self._producer.close()

    def close(self) -> None:
        """Close the collector's environments."""
        self._collector.close()

    def stats(self) -> dict[str, int | float]:
        """Return the cumulative counters of this generation; see the table in :mod:`numa_collectors.collector`."""
        stats = dict(self._counters)
        for stage, timer in self._ctx.timers.items():
            stats[f"{stage}_ns"] = timer.total_ns
        for tag, value in self._collector.sums().items():
            stats[f"sum:{tag}"] = value
        stats["time_ns"] = time.monotonic_ns()
        stats["weight_version"] = self._version
        stats["generation"] = self._ctx.generation
        stats["start_slot"] = self._ctx.start_slot
        if self._digests:
            stats["first_obs_digest"] = self._digests[0]
            stats["first_obs_distinct"] = len(set(self._digests))
        return stats

    def _quota_reached(self) -> bool:
        quota = self._options.quota_slots if self._quota_slots is None else self._quota_slots()
        return quota is not None and self._producer.committed >= quota

    def _have_weights(self, timeout_s: float | None) -> bool:
        if self._reader is None:
            return True
        if self._version and self._since_poll < self._options.weight_poll_interval and not self._too_old(self._reader):
            return True
        self._since_poll = 0
        if self._poll(self._reader) or self._version:
            return True
        begin_s = time.monotonic()
        with self._waiting():
            self._await_first_weights(self._reader, timeout_s)
        self._counters["wait_weights_s"] += time.monotonic() - begin_s
        return self._version > 0

    def _too_old(self, reader: SnapshotReader) -> bool:
        limit = self._options.max_policy_lag
        return limit is not None and reader.latest - self._version > limit

    def _wait_for_learner(self, timeout_s: float | None) -> bool:
        """Wait while what was made and not taken is too old; return whether it no longer is.

        What a predecessor made is not looked at.  RingClosedError or PeerLostError when the consumer will take no more.
        """
        if not self._unread_too_old():
            return True
        begin_ns = time.monotonic_ns()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting():
            while (too_old := self._unread_too_old()) and (deadline is None or time.monotonic() < deadline):
                time.sleep(_PACING_POLL_S)
                self._producer.try_reserve()  # the slot that is reserved already, or the end of the ring
        self._counters["wait_space_ns"] += time.monotonic_ns() - begin_ns
        return not too_old

    def _unread_too_old(self) -> bool:
        limit = self._options.max_policy_lag
        if self._released is None or self._reader is None or limit is None or not self._unread:
            return False
        taken = self._released()
        while len(self._unread) > 1 and self._unread[1][0] <= taken:
            self._unread.popleft()
        return taken < self._producer.committed and self._reader.latest - self._unread[0][1] > limit

    def _await_first_weights(self, reader: SnapshotReader, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._poll(reader):
            if deadline is not None and time.monotonic() >= deadline:
                return
            time.sleep(_FIRST_WEIGHTS_POLL_S)

    def _poll(self, reader: SnapshotReader) -> bool:
        begin_ns = time.monotonic_ns()
        version = reader.poll()
        if version is not None and version > 0:
            self._collector.load_weights(reader.weights, version)
            self._version = version
            self._counters["weight_loads"] += 1
        self._counters["sync_ns"] += time.monotonic_ns() - begin_ns
        return version is not None and version > 0

    def _reserve(self, timeout_s: float | None) -> Mapping[str, np.ndarray] | None:
        slot = self._producer.try_reserve()
        if slot is not None or timeout_s == 0:
            return slot
        begin_ns = time.monotonic_ns()
        try:
            with self._waiting():
                return self._producer.reserve(timeout_s)
        finally:
            self._counters["wait_space_ns"] += time.monotonic_ns() - begin_ns

    def _collect(self, slot: dict[str, np.ndarray]) -> None:
        step, counters, finite = self._producer.committed, self._counters, self._finite
        first = not counters["slots"]
        if first and finite is not None:
            finite.poison(slot)
        begin_ns = time.monotonic_ns()
        try:
            self._collector.collect(slot)
        except NumaCollectorsError:
            raise
        except Exception as error:
            raise self._ctx.error(f"collect() raised {type(error).__name__}: {error}", step=step) from error
        collected_ns = time.monotonic_ns()
        if finite is not None:
            finite.check(slot, step)
        if first:
            self._digests = first_observation_digests(slot)
        checked_ns = time.monotonic_ns()
        valid = slot.get("valid")
        masked = 0 if valid is None else int(valid.size - np.count_nonzero(valid))
        self._producer.commit(version=self._version, step=step)
        if self._released is not None and (not self._unread or self._unread[-1][1] != self._version):
            self._unread.append((step, self._version))
        counters["collect_ns"] += collected_ns - begin_ns
        counters["check_s"] += (checked_ns - collected_ns) / 1e9
        counters["push_ns"] += time.monotonic_ns() - checked_ns
        counters["slots"] += 1
        counters["env_steps"] += self._ctx.num_envs
        counters["masked_env_steps"] += masked
        self._since_poll += 1
        for episode in self._collector.drain_episodes():
            counters["episodes"] += 1
            counters["return_sum"] += episode.return_
            counters["length_sum"] += episode.length


def _drop_views(error: BaseException | None, running: FrameType) -> None:
    """Clear the locals of the library's own frames in the tracebacks of ``error`` and what caused it.

    They hold views of the ring, which could not be closed for as long as somebody keeps the exception.
    """
    while error is not None:
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if frame is not running and frame.f_globals.get("__name__", "").startswith("numa_collectors."):
                frame.clear()
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def build_loop(
    factory: CollectorFactory,
    ctx: CollectorContext,
    ring: TransitionRing,
    snapshot: WeightSnapshot | None,
    options: CollectorOptions | None = None,
    *,
    quota_slots: Callable[[], int | None] | None = None,
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> CollectorLoop:
    """Make the collector and its loop in the calling process, taking up where earlier generations of this rank left
    the ring.

    Raises ConfigError where the factory does not return a Collector; what the factory itself raises passes through.
    """
    ctx = ctx.restarted(ctx.generation, start_slot=ring.committed)
    collector = factory(ctx)
    if not isinstance(collector, Collector):
        raise ConfigError(
            f"{ctx.name}: expected the collector factory {factory!r} to return a numa_collectors.Collector, got "
            f"{type(collector).__name__} {collector!r}"
        )
    # The producer comes last: closing it after an error here would tell the consumer that this collector has finished.
    try:
        reader = None if snapshot is None else snapshot.reader()
        producer = ring.producer(generation=ctx.generation)
    except BaseException:
        collector.close()
        raise
    return CollectorLoop(
        collector,
        producer,
        reader,
        ctx,
        options,
        quota_slots=quota_slots,
        waiting=waiting,
        released=lambda: ring.released,
    )
