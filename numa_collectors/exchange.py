"""The learner's side of every ring and every snapshot: drain all, publish to all, wait for none.

Guarantees
    * Draining is round-robin with a cap a ring.  A ring that is empty, slow or dead costs one look at its cursor; no
      generation is assembled across collectors and no global order exists.
    * A slot is released only after the loop body that received it has asked for the next one.  A body that raises or
      breaks is given the same slots again: nothing is lost between "delivered" and "used".
    * Publishing writes each snapshot once and waits for no reader.

Not covered
    * Several threads on one ``Exchange``: like its rings it has one user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from numa_collectors.metrics import LagHistogram
from numa_collectors.rings import Consumer, Span, TransitionRing, wait_any
from numa_collectors.snapshots import SnapshotPublisher, WeightSnapshot

__all__ = ["Exchange"]

# Between two looks at rings that slots gather in, and how many of them.
_NAP_S = 0.001
_NUM_NAPS = 5


class Exchange:
    """Consumers of ``rings`` and publishers of ``snapshots``, index = rank of the collector.

    ``version`` is the version last published (0 before the first); it rises across runs when ``first_version`` is given.
    """

    def __init__(
        self,
        rings: Sequence[TransitionRing],
        snapshots: Sequence[WeightSnapshot],
        *,
        first_version: int = 0,
    ) -> None:
        self.consumers: tuple[Consumer, ...] = tuple(ring.consumer() for ring in rings)
        self._publishers: tuple[SnapshotPublisher, ...] = tuple(snapshot.publisher() for snapshot in snapshots)
        self.version = max([first_version, *(publisher.version for publisher in self._publishers)])
        self.lags = tuple(LagHistogram() for _ in rings)
        self.num_publishes = 0
        self.publish_ns = 0
        self._turn = 0

    @property
    def num_collectors(self) -> int:
        """Number of rings."""
        return len(self.consumers)

    def drain(
        self, max_slots: int | None = None, *, load: Callable[[Sequence[tuple[int, Span]]], None] | None = None
    ) -> Iterator[tuple[int, Span]]:
        """Yield ``(rank, span)`` for what is committed now, at most ``max_slots`` slots a ring, round-robin.

        A span is a view into the ring and valid until the next one is asked for; the ring's end splits a run of slots into
        two spans, and the second comes in a further round.  The rank that comes first rotates from call to call.  ``load`` is
        given all spans of a round, one of each ring that has slots, before the first of them is yielded.
        """
        self._turn = (self._turn + 1) % max(1, self.num_collectors)
        ranks = [(self._turn + offset) % self.num_collectors for offset in range(self.num_collectors)]
        budgets = {rank: self.consumers[rank].fill for rank in ranks}
        if max_slots is not None:
            budgets = {rank: min(max_slots, fill) for rank, fill in budgets.items()}
        while spans := [span for rank in ranks if budgets[rank] > 0 for span in self._peek(rank, budgets[rank])]:
            if load is not None:
                load(spans)
            for rank, span in spans:
                self.lags[rank].record(self.version, span.versions)
                yield rank, span
                self.consumers[rank].release(span.num_slots)
                budgets[rank] -= span.num_slots

    def _peek(self, rank: int, max_slots: int) -> Iterator[tuple[int, Span]]:
        span = self.consumers[rank].peek(max_slots)
        if span is not None:
            yield rank, span

    def wait(self, timeout_s: float, min_slots: int = 1) -> bool:
        """Wait until a ring has a slot or comes to its end; return whether one did.

        ``min_slots`` above 1 lets so many come together, over all rings, for at most 5 ms more and until one of them is half
        full: a learner that is woken for every slot takes the CPU that it shares with a collector from it each time.
        """
        waiting = [consumer for consumer in self.consumers if not consumer.closed]
        if not waiting or not wait_any(waiting, timeout_s):
            return False
        for _ in range(_NUM_NAPS):
            fills = [consumer.fill for consumer in waiting]
            half_full = any(2 * fill >= ring.memory.limit for fill, ring in zip(fills, waiting, strict=True))
            if sum(fills) >= min_slots or half_full:
                break
            time.sleep(_NAP_S)
        return True

    @property
    def finished(self) -> bool:
        """Whether every ring is empty and closed, or its producer lost: nothing will ever come."""
        return all(consumer.closed for consumer in self.consumers)

    def publish(self, weights: memoryview | Mapping[str, Any]) -> int:
        """Write the next version to every snapshot and return it; ``weights`` is the flat layout or a mapping."""
        # Counted before it is written: after an exception in between, as of Ctrl-C, the next one is above what was written.
        self.version = version = self.version + 1
        started = time.perf_counter_ns()
        for publisher in self._publishers:
            if isinstance(weights, memoryview):
                publisher.publish_bytes(weights, version)
            else:
                publisher.publish(weights, version)
        self.publish_ns += time.perf_counter_ns() - started
        self.num_publishes += 1
        return version

    def close(self) -> None:
        """Close the consuming side of every ring: a producer that waits for space is told so."""
        for consumer in self.consumers:
            consumer.close()
