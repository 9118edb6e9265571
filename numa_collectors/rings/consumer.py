"""The reading end of a ring, and waiting on many rings at once."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from numa_collectors._futex import (
    FUTEX_WAITV_MAX,
    STORE_ORDER_STRONG,
    full_fence,
    futex_waitv,
    futex_waitv_available,
)
from numa_collectors.errors import PeerLostError, RingClosedError
from numa_collectors.rings.endpoint import (
    ASLEEP,
    NUM_SPINS,
    ON_BELL,
    Endpoint,
    RingMemory,
    sleep_on,
)
from numa_collectors.rings.layout import (
    B_CONSUMER_CLOSED,
    B_CONSUMER_LOST,
    M_GENERATION,
    M_STEP,
    M_TIMESTAMP,
    M_VERSION,
    META_WORDS,
    PRODUCER_CLOSED,
    PRODUCER_LOST,
    RING_CLOSED,
    STOPS_CONSUMER,
    W_COMMITTED,
    W_CONSUMER_ASLEEP,
    W_CONSUMER_CLAIM,
    W_PRODUCER_ASLEEP,
    W_PRODUCER_CLAIM,
    W_RELEASED,
    W_STATE,
    Array,
    build_arrays,
    build_metadata,
)

__all__ = ["Consumer", "Span", "wait_any"]

_SLICE_S = 0.005
MAX_SPANS = 4096


class Span(dict[str, Array]):
    """A contiguous run of committed slots: field name -> read-only array ``(num_slots, *shape)`` into the ring's
    memory.

    Valid until the slots are released; copy what must live longer.  The metadata are int64 arrays ``(num_slots,)``.
    A consumer makes each of its spans once and gives it out again; when it closes it empties them, so that a span
    left lying about keeps no memory mapped.
    """

    __slots__ = ("_metadata", "_start", "_stop")

    def __init__(self, arrays: Mapping[str, Array], metadata: npt.NDArray[np.int64], start: int, stop: int) -> None:
        super().__init__({name: array[start:stop] for name, array in arrays.items()})
        self._metadata = metadata[start:stop]
        self._start = start
        self._stop = stop

    def drop(self) -> None:
        """Forget the memory."""
        self.clear()
        self._metadata = np.empty((0, META_WORDS), np.int64)

    def __repr__(self) -> str:
        return f"Span(num_slots={self.num_slots}, fields={list(self)})"

    @property
    def num_slots(self) -> int:
        """Slots in the run, at least 1."""
        return self._stop - self._start

    @property
    def start(self) -> int:
        """Index in the ring of the first slot, 0 to capacity - 1."""
        return self._start

    @property
    def versions(self) -> npt.NDArray[np.int64]:
        """Weight version that acted, per slot."""
        return self._metadata[:, M_VERSION]

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """The collector's step, per slot."""
        return self._metadata[:, M_STEP]

    @property
    def generations(self) -> npt.NDArray[np.int64]:
        """Generation of the producer that wrote the slot."""
        return self._metadata[:, M_GENERATION]

    @property
    def timestamps_ns(self) -> npt.NDArray[np.int64]:
        """When the slot was committed: CLOCK_MONOTONIC in nanoseconds, one clock for all processes of a host."""
        return self._metadata[:, M_TIMESTAMP]


class Consumer(Endpoint):
    """Reads slots where they lie.  Obtained from :meth:`TransitionRing.consumer`; begins at the released cursor.

    The released cursor in shared memory is the only record of how far it is: an exception between any two instructions, as of
    Ctrl-C, leaves slots released or not, and the consumer fit to go on.
    """

    _side = "consumer"
    _cursor = W_RELEASED
    _claim = W_CONSUMER_CLAIM
    _asleep = W_CONSUMER_ASLEEP
    _peer_asleep = W_PRODUCER_ASLEEP
    _peer_claim = W_PRODUCER_CLAIM

    def __init__(self, memory: RingMemory) -> None:
        super().__init__(memory, 0)
        self._data = memory.data.cast("B")
        self._data[B_CONSUMER_CLOSED] = 0
        self._data[B_CONSUMER_LOST] = 0
        self._capacity = memory.capacity
        self._committed: int = self._words[W_COMMITTED]
        readonly = memory.data.toreadonly()
        self._arrays = build_arrays(memory.schema, memory.capacity, readonly)
        self._metadata = build_metadata(memory.capacity, readonly)
        self._spans: dict[int, Span] = {}

    def _after_fork(self) -> None:
        super()._after_fork()
        self._drop_spans()

    @property
    def memory(self) -> RingMemory:
        """The mapped ring."""
        return self._memory

    @property
    def fill(self) -> int:
        """Committed slots that are not released."""
        return int(self._words[W_COMMITTED] - self._words[W_RELEASED])

    @property
    def released(self) -> int:
        """Slots released since the ring was made."""
        return self._position()

    def peek(self, max_slots: int | None = None) -> Span | None:
        """The longest contiguous run of committed slots, at most ``max_slots``; None when there is none.

        A run ends at the ring's end, so a wrapped fill takes two calls.  Peeking again before :meth:`release` gives
        the same slots.  A closed or lost producer's slots are still delivered; then this stays None and
        :attr:`closed` is True.
        """
        words = self._words
        released = words[W_RELEASED]
        available = self._committed - released
        if max_slots is None or available < max_slots:
            self._committed = words[W_COMMITTED]
            if not STORE_ORDER_STRONG:
                # Data must be read after the cursor that covers them.
                self._begin_fence()
                self._end_fence()
            available = self._committed - released
            if available == 0:
                return None
        start = released % self._capacity
        if available > self._capacity - start:
            available = self._capacity - start
        if max_slots is not None and available > max_slots:
            available = max_slots
        span = self._spans.get(start << 32 | available)
        return self._make_span(start, available) if span is None else span

    def _make_span(self, start: int, num_slots: int) -> Span:
        if num_slots < 1:
            raise ValueError(f"max_slots must be at least 1, got {num_slots}")
        if len(self._spans) >= MAX_SPANS:
            self._spans.clear()
        span = self._spans[start << 32 | num_slots] = Span(self._arrays, self._metadata, start, start + num_slots)
        return span

    def _drop_spans(self) -> None:
        for span in self._spans.values():
            span.drop()
        self._spans.clear()
        self._arrays = {}
        self._metadata = np.empty((0, META_WORDS), np.int64)

    def release(self, num_slots: int) -> None:
        """Give the oldest ``num_slots`` slots back to the producer; their views must not be read after this."""
        words = self._words
        released = words[W_RELEASED]
        if not 0 <= num_slots <= self._committed - released:
            raise ValueError(
                f"ring {self._memory.name!r}: release({num_slots}), but {self._committed - released} slots were peeked"
            )
        if not STORE_ORDER_STRONG:
            # Our reads of the slots must be done before the producer may write there.
            self._begin_fence()
            self._end_fence()
        words[W_RELEASED] = released + num_slots
        # Release before asking whether the producer sleeps: a store before a load needs a full fence everywhere.
        self._begin_fence()
        self._end_fence()
        if words[W_PRODUCER_ASLEEP]:
            self._memory.wake(W_PRODUCER_ASLEEP)

    def has_slots_or_ended(self) -> bool:
        """Whether waiting any longer is pointless: there are slots, or none will ever come."""
        words = self._words
        return bool(words[W_COMMITTED] != words[W_RELEASED] or words[W_STATE] & STOPS_CONSUMER)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to ``timeout_s`` seconds (None: without limit) for a slot; False when none came in time.

        When none will ever come: RingClosedError after an orderly close, PeerLostError when the producer was declared
        dead.
        """
        if self._words[W_COMMITTED] != self._words[W_RELEASED]:
            return True
        if not self._sleep_until(self.has_slots_or_ended, timeout_s):
            return False
        if not self._ended():
            return True
        if self._words[W_STATE] & (PRODUCER_CLOSED | RING_CLOSED):
            raise RingClosedError(f"ring {self._memory.name!r} is closed and empty; nothing more will come")
        raise PeerLostError(f"ring {self._memory.name!r} is empty and its producer died; restart it or stop waiting")

    def _ended(self) -> bool:
        if not self._words[W_STATE] & STOPS_CONSUMER:
            return False
        # The last slots were committed before the end was said; look for them only after having seen it.
        full_fence()
        return bool(self._words[W_COMMITTED] == self._words[W_RELEASED])

    @property
    def closed(self) -> bool:
        """True once nothing more will come: producer closed, lost or ring closed, and every committed slot released."""
        return not self._open or self._ended()

    @property
    def peer_lost(self) -> bool:
        """True while the producer is declared dead and no successor has taken over."""
        return bool(self._words[W_STATE] & PRODUCER_LOST)

    def close(self) -> None:
        """Say that nobody reads any more, and wake the producer.  May be called twice."""
        if not self._open:
            return
        self._data[B_CONSUMER_CLOSED] = 1
        self._let_go()
        full_fence()
        self._memory.wake(W_PRODUCER_ASLEEP)
        self._drop_spans()
        self._data.release()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wait_any(consumers: Sequence[Consumer], timeout_s: float | None = None) -> bool:
    """Wait until one of ``consumers`` has a slot or will never have one; False when ``timeout_s`` seconds pass before.

    A closed ring counts as ready, so that its end is noticed: leave out consumers whose :attr:`Consumer.closed` is
    True. One futex_waitv(2) covers up to 128 rings.  With more, or on kernels before 5.16, rings that share a bell
    (:meth:`TransitionRing.share_bell`) are waited for by it, others by a look every 5 milliseconds.
    """
    if not consumers:
        raise ValueError("wait_any() needs at least one consumer")
    checks = [consumer.has_slots_or_ended for consumer in consumers]

    def any_ready() -> bool:
        for check in checks:  # noqa: SIM110 - any() over a generator takes twice as long
            if check():
                return True
        return False

    ready = any_ready if len(checks) > 1 else checks[0]
    if ready():
        return True
    if timeout_s is not None and timeout_s <= 0:
        return False
    for _ in range(NUM_SPINS // (1 + len(checks)) + 1):  # looks that take as long as NUM_SPINS ones at one ring
        if ready():
            return True
    return sleep_on(*_arm_and_block([consumer.memory for consumer in consumers]), ready, timeout_s)


def _arm_and_block(memories: Sequence[RingMemory]) -> tuple[Callable[[int], None], Callable[[float], object]]:
    """How to say "asleep" to all producers, and how to sleep once."""
    words = [memory.words for memory in memories]

    def arm(word: int) -> None:
        for view in words:
            view[W_CONSUMER_ASLEEP] = word

    if len(memories) <= FUTEX_WAITV_MAX and futex_waitv_available():
        addresses = [memory.futex_address(W_CONSUMER_ASLEEP) for memory in memories]
        return arm, functools.partial(futex_waitv, addresses, [ASLEEP] * len(addresses))
    bell = memories[0].bell
    if bell is None or any(memory.bell is None or memory.bell.identity != bell.identity for memory in memories):
        return arm, lambda seconds: time.sleep(min(seconds, _SLICE_S))

    def arm_bell(word: int) -> None:
        bell.arm(word)
        arm(ON_BELL if word == ASLEEP else word)

    return arm_bell, bell.sleep
