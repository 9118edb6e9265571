"""The writing end of a ring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from time import monotonic_ns
from types import TracebackType
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from numa_collectors._futex import STORE_ORDER_STRONG, full_fence
from numa_collectors.errors import PeerLostError, RingClosedError, SchemaMismatchError
from numa_collectors.rings.endpoint import C_GENERATION, C_PID, Endpoint, RingMemory
from numa_collectors.rings.layout import (
    B_PRODUCER_CLOSED,
    B_PRODUCER_LOST,
    CONSUMER_LOST,
    HEADER_BYTES,
    M_GENERATION,
    M_STEP,
    M_TIMESTAMP,
    M_VERSION,
    META_WORDS,
    STOPS_PRODUCER,
    W_COMMITTED,
    W_CONSUMER_ASLEEP,
    W_CONSUMER_CLAIM,
    W_PRODUCER_ASLEEP,
    W_PRODUCER_CLAIM,
    W_RELEASED,
    W_STATE,
    Array,
    build_arrays,
)
from numa_collectors.rings.schema import Field

__all__ = ["Producer", "Source", "as_bytes", "check_field", "refuse_fields"]

_META_BASE = HEADER_BYTES // 8


class _Slot:
    """The views of one slot: its fields, with what a fitting array has, the same as bytes, and its metadata as words."""

    __slots__ = ("blocks", "fields", "record", "views")

    def __init__(self, arrays: Mapping[str, Array], metadata: memoryview, index: int) -> None:
        self.views: dict[str, Array] = {name: array[index, ...] for name, array in arrays.items()}
        self.fields = [(name, view, view.dtype, view.shape) for name, view in self.views.items()]
        self.blocks = [as_bytes(view) for view in self.views.values()]
        self.record = metadata[index * META_WORDS : (index + 1) * META_WORDS]

    def drop(self) -> None:
        self.views.clear()
        self.fields.clear()
        for block in self.blocks:
            block.release()
        self.record.release()


def as_bytes(array: Array) -> memoryview:
    """The bytes of a C-contiguous array.  Copying between two of these is a third of a numpy assignment's cost."""
    return array.reshape(-1).view(np.uint8).data


def refuse_fields(ring: str, expected: Iterable[str], values: Mapping[str, npt.ArrayLike]) -> NoReturn:
    """Raise SchemaMismatchError: ``values`` are not exactly the ``expected`` fields."""
    missing, unknown = sorted(set(expected) - set(values)), sorted(set(values) - set(expected))
    raise SchemaMismatchError(
        f"ring {ring!r}: push() needs exactly the fields of the schema; missing {missing}, unknown {unknown}"
    )


def check_field(ring: str, field: str, view: Array, value: npt.ArrayLike) -> Array:
    """Return ``value`` as an array that can be copied into ``view``, or raise SchemaMismatchError."""
    array = np.asarray(value)
    if array.shape != view.shape or not np.can_cast(array.dtype, view.dtype, "same_kind"):
        raise SchemaMismatchError(
            f"ring {ring!r}, field {field!r}: expected {view.dtype}{list(view.shape)}, got {array.dtype}"
            f"{list(array.shape)}; convert it before push()"
        )
    return array


def _check_source(ring: str, field: Field, value: Array) -> None:
    """Raise SchemaMismatchError unless the bytes of ``value`` are those of ``field``."""
    if type(value) is not np.ndarray or value.dtype != field.dtype or value.shape != field.shape:
        got = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise SchemaMismatchError(
            f"ring {ring!r}, field {field.name!r}: a source needs a numpy array {field.dtype}{list(field.shape)}, got {got}"
        )
    if not value.flags.c_contiguous:
        raise SchemaMismatchError(
            f"ring {ring!r}, field {field.name!r}: a source needs a C-contiguous array, got strides {value.strides}; use "
            "numpy.ascontiguousarray(), or push() without source()"
        )


class Source(Mapping[str, Array]):
    """The arrays of one slot, checked once, for :meth:`Producer.push` to copy again and again.

    Obtained from :meth:`Producer.source`.  New values are written into the arrays; other arrays need another source.
    """

    __slots__ = ("_arrays", "_blocks", "_copies", "_owner")

    def __init__(self, owner: Producer, arrays: dict[str, Array], capacity: int) -> None:
        self._owner = owner
        self._arrays = arrays
        self._blocks = [as_bytes(array) for array in arrays.values()]
        # By slot: pairs made once, since zip() costs a quarter of the copies of a small slot.
        self._copies: list[tuple[tuple[memoryview, memoryview], ...]] = [()] * capacity

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def _pair(self, index: int, slot: _Slot) -> tuple[tuple[memoryview, memoryview], ...]:
        pairs = self._copies[index] = tuple(zip(slot.blocks, self._blocks, strict=True))
        return pairs


class Producer(Endpoint):
    """Writes slots, in place or by copying.

    The committed cursor in shared memory is the only record of how far it is: an exception between any two instructions, as
    of Ctrl-C, leaves a slot committed or not, and the producer fit to go on.

    Obtained from :meth:`TransitionRing.producer`.  ``generation`` must be higher than every predecessor's; writing
    goes on at the committed cursor, so a slot that a predecessor had reserved and not committed is written anew.
    """

    _side = "producer"
    _cursor = W_COMMITTED
    _claim = W_PRODUCER_CLAIM
    _asleep = W_PRODUCER_ASLEEP
    _peer_asleep = W_CONSUMER_ASLEEP
    _peer_claim = W_CONSUMER_CLAIM

    def __init__(self, memory: RingMemory, generation: int = 0) -> None:
        if generation < 0:
            raise ValueError(f"generation must be at least 0, got {generation}")
        previous = memory.words[W_PRODUCER_CLAIM + C_GENERATION]
        if memory.words[W_PRODUCER_CLAIM + C_PID] and generation <= previous and not memory.claimed_by(self._claim):
            raise ValueError(
                f"ring {memory.name!r} has had a producer of generation {previous}; a successor needs a higher "
                f"generation, got {generation}"
            )
        super().__init__(memory, generation)
        self._data = memory.data.cast("B")
        self._data[B_PRODUCER_CLOSED] = 0
        self._data[B_PRODUCER_LOST] = 0
        self._generation = generation
        self._capacity = memory.capacity
        self._limit = memory.limit
        self._released: int = self._words[W_RELEASED]
        self._reserved = -1
        self._arrays = build_arrays(memory.schema, memory.capacity, memory.data)
        self._slots: list[_Slot | None] = [None] * memory.capacity
        self._fields = memory.schema

    @property
    def committed(self) -> int:
        """Slots committed since the ring was made, predecessors' included."""
        return self._position()

    @property
    def generation(self) -> int:
        """This producer's generation, written into every slot."""
        return self._generation

    def try_reserve(self) -> Mapping[str, Array] | None:
        """Writable views of the next slot, or None while the ring is full.

        Calling it again before :meth:`commit` gives the same slot.  The views must not be written after ``commit``.
        Raises RingClosedError or PeerLostError when nobody will read any more.
        """
        words = self._words
        if words[W_STATE]:
            self._check_open()
        committed = words[W_COMMITTED]
        if committed - self._released >= self._limit:
            self._released = words[W_RELEASED]
            # No fence: the writes into the slot depend on this branch, and no CPU stores before a branch is decided.
            if committed - self._released >= self._limit:
                return None
        index = committed % self._capacity
        slot = self._slots[index] or self._make_slot(index)
        self._reserved = committed
        return slot.views

    def _make_slot(self, index: int) -> _Slot:
        slot = _Slot(self._arrays, self._words[_META_BASE:], index)
        slot.record[M_GENERATION] = self._generation
        self._slots[index] = slot
        return slot

    def reserve(self, timeout_s: float | None = None) -> Mapping[str, Array] | None:
        """As :meth:`try_reserve`, waiting up to ``timeout_s`` seconds (None: without limit) for space."""
        slot = self.try_reserve()
        if slot is not None or timeout_s == 0:
            return slot
        if not self._sleep_until(self._has_space, timeout_s):
            return None
        return self.try_reserve()

    def _has_space(self) -> bool:
        words = self._words
        return bool(words[W_COMMITTED] - words[W_RELEASED] < self._limit or words[W_STATE] & STOPS_PRODUCER)

    def commit(self, *, version: int = 0, step: int = 0) -> None:
        """Publish the reserved slot with the weight ``version`` that acted and the collector's ``step``."""
        committed = self._words[W_COMMITTED]
        slot = self._slots[committed % self._capacity]
        if slot is None or self._reserved != committed:
            self._refuse_commit()
        self._publish(slot, committed, version, step)

    def _refuse_commit(self) -> NoReturn:
        raise RuntimeError(f"ring {self._memory.name!r}: commit() without a slot from try_reserve() or reserve()")

    def _publish(self, slot: _Slot, committed: int, version: int, step: int) -> None:
        record = slot.record
        record[M_VERSION] = version
        record[M_STEP] = step
        record[M_TIMESTAMP] = monotonic_ns()
        if not STORE_ORDER_STRONG:
            self._begin_fence()
            self._end_fence()
        words = self._words
        words[W_COMMITTED] = committed + 1
        # Publish before asking whether anybody sleeps: a store before a load, which x86-64 too reorders without a
        # fence.
        self._begin_fence()
        self._end_fence()
        if words[W_CONSUMER_ASLEEP]:
            self._memory.wake(W_CONSUMER_ASLEEP)

    def push(
        self, values: Mapping[str, npt.ArrayLike], *, version: int = 0, step: int = 0, timeout_s: float | None = None
    ) -> bool:
        """Copy ``values`` (one array per field, shape ``shape``) into the next slot and commit it.

        False when ``timeout_s`` ran out before there was space.  The arrays may be reused as soon as this returns.  A
        missing or unknown field, another shape, or a dtype that does not cast safely or within its kind raises
        SchemaMismatchError and commits nothing.
        """
        words = self._words
        committed = words[W_COMMITTED]
        index = committed % self._capacity
        slot = self._slots[index]
        # What try_reserve() does, without the call where the slot is known and the ring looks neither full nor ended.
        if slot is None or committed - self._released >= self._limit or words[W_STATE]:
            if self.reserve(timeout_s) is None:
                return False
            slot = self._slots[index] or self._make_slot(index)
        if type(values) is Source and values._owner is self:
            for destination, block in values._copies[index] or values._pair(index, slot):
                destination[:] = block
        else:
            self._copy(slot, values)
        self._publish(slot, committed, version, step)
        return True

    def source(self, values: Mapping[str, Array]) -> Source:
        """Return ``values`` (one C-contiguous array per field, shape ``shape``) as what this producer pushes fastest.

        Worth it where the same arrays are pushed many times: nothing is checked any more, and a push of a small slot takes
        half of the time. A compact ring takes it like any other mapping. Raises SchemaMismatchError for a missing or unknown
        field, another shape or dtype, or an array that is not C-contiguous.
        """
        if values.keys() != set(self._fields.names):
            refuse_fields(self._memory.name, self._fields.names, values)
        for field in self._fields.fields:
            _check_source(self._memory.name, field, values[field.name])
        return Source(self, {name: values[name] for name in self._fields.names}, self._capacity)

    def _copy(self, slot: _Slot, values: Mapping[str, npt.ArrayLike]) -> None:
        if len(values) != len(slot.fields):
            refuse_fields(self._memory.name, self._fields.names, values)
        for name, view, dtype, shape in slot.fields:
            try:
                value = values[name]
            except KeyError:
                refuse_fields(self._memory.name, self._fields.names, values)
            # The usual case needs no call, which would be half of the cost.
            if type(value) is not np.ndarray or value.dtype is not dtype or value.shape != shape:
                value = check_field(self._memory.name, name, view, value)
            view[...] = value

    def _check_open(self) -> None:
        state = self._words[W_STATE] & STOPS_PRODUCER
        if state == CONSUMER_LOST:
            raise PeerLostError(f"ring {self._memory.name!r}: the consumer died; nobody reads what would be written")
        if state:
            raise RingClosedError(f"ring {self._memory.name!r} is closed; nobody reads what would be written")

    def close(self) -> None:
        """Say that nothing more comes, and wake the consumer.  A reserved slot is dropped.  May be called twice."""
        if not self._open:
            return
        self._data[B_PRODUCER_CLOSED] = 1
        self._let_go()
        full_fence()
        self._memory.wake(W_CONSUMER_ASLEEP)
        for slot in self._slots:
            if slot is not None:
                slot.drop()
        self._arrays = {}
        self._data.release()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
