"""The two ends of a compact ring: the plain slots that a collector writes and a learner reads, over the stored ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from numa_collectors.rings._compact_layout import BEGINS, EXTENT, CompactLayout
from numa_collectors.rings.consumer import MAX_SPANS, Consumer, Span
from numa_collectors.rings.endpoint import RingMemory
from numa_collectors.rings.layout import STOPS_PRODUCER, W_RELEASED, W_STATE, Array, build_arrays, build_metadata
from numa_collectors.rings.producer import Producer, as_bytes, check_field, refuse_fields

__all__ = ["CompactConsumer", "CompactProducer", "CompactSpan"]


class _Writer:
    """The producer's view of a compact ring's memory."""

    def __init__(self, memory: RingMemory, layout: CompactLayout, committed: int) -> None:
        self._memory = memory
        self._layout = layout
        self._num_slots = memory.capacity
        self._stored = build_arrays(memory.schema, memory.capacity, memory.data)
        self._side = layout.build_side(memory.capacity - 1, memory.data)
        self._num_side_rows = layout.num_side_rows(memory.capacity - 1)
        self._begins, self._extents = self._stored[BEGINS], self._stored[EXTENT]
        # Private: the ring keeps what the slot before holds for the same rows, which is being read.  A bytearray compares by
        # memcmp, at the speed of memory, which nothing in numpy does.
        self._blocks = [bytearray(layout.fields[name].nbytes) for name in layout.pairs]
        self._obs: dict[str, Array] = {
            name: np.frombuffer(block, layout.fields[name].dtype).reshape(layout.fields[name].shape)
            for name, block in zip(layout.pairs, self._blocks, strict=True)
        }
        self._views: list[dict[str, Array] | None] = [None] * self._num_slots
        self._following: list[list[memoryview] | None] = [None] * self._num_slots
        # An uncommitted slot of a predecessor may have used rows beyond; they are taken anew.
        self._head = int(self._extents[(committed - 1) % self._num_slots].sum()) if committed else 0
        self._tail = self._oldest(committed)

    def _oldest(self, committed: int) -> int:
        """Serial number of the oldest side row in use."""
        released: int = self._memory.words[W_RELEASED]
        # No fence: the writes into rows that are free depend on this value, and no CPU stores before it has it.
        return int(self._extents[released % self._num_slots, 0]) if released < committed else self._head

    def has_room(self, committed: int) -> bool:
        """Whether the side area could take every row of the next slot."""
        most = self._num_side_rows - self._layout.num_rows
        if self._head - self._tail > most:
            self._tail = self._oldest(committed)
        return self._head - self._tail <= most

    def views(self, committed: int) -> dict[str, Array]:
        """The next slot as the collector writes it."""
        index = committed % self._num_slots
        found = self._views[index]
        if found is None:
            names = self._layout.schema.names
            found = {name: self._obs[name] if name in self._obs else self._stored[name][index, ...] for name in names}
            self._views[index] = found
        return found

    def store(self, committed: int) -> None:
        """Put the observations that the slot before does not hold into the side area, and record which these are."""
        index = committed % self._num_slots
        begins = self._begins[index]
        begins.fill(committed == 0)
        if committed:
            for block, before in zip(self._blocks, self._before(committed - 1), strict=True):
                if block != before:
                    begins |= (self._row_words(block) != self._row_words(before)).any(axis=1)
        rows = np.flatnonzero(begins)
        self._extents[index] = self._head, len(rows)
        if len(rows):
            places = (self._head + np.arange(len(rows))) % self._num_side_rows
            for name, side in self._side.items():
                side[places] = self._obs[name][rows]
            self._head += len(rows)

    def _before(self, serial: int) -> list[memoryview]:
        """The bytes of a slot's next observations."""
        index = serial % self._num_slots
        found = self._following[index]
        if found is None:
            names = self._layout.pairs.values()
            found = [as_bytes(self._stored[name][index]) for name in names]
            self._following[index] = found
        return found

    def _row_words(self, block: bytearray | memoryview) -> Array:
        """The rows as ``(rows, words)`` of the widest unsigned integers that divide a row."""
        width = next(width for width in (8, 4, 2, 1) if len(block) // self._layout.num_rows % width == 0)
        return np.frombuffer(block, f"u{width}").reshape(self._layout.num_rows, -1)

    def drop(self) -> None:
        """Forget the memory."""
        for views in self._views:
            if views is not None:
                views.clear()
        self._following.clear()
        self._stored, self._side = {}, {}
        self._begins = self._extents = np.empty((0, 2), np.int64)


class CompactProducer(Producer):
    """The writing end of a :class:`CompactRing`; a slot's paired observations are private memory until the commit."""

    def __init__(self, memory: RingMemory, layout: CompactLayout, generation: int = 0) -> None:
        super().__init__(memory, generation)
        self._writer = _Writer(memory, layout, self.committed)
        self._fields = layout.schema

    def try_reserve(self) -> Mapping[str, Array] | None:
        """As :meth:`Producer.try_reserve`; None also while the side area could not take all rows of a slot."""
        committed = self.committed
        if super().try_reserve() is None:
            return None
        if not self._writer.has_room(committed):
            self._reserved = -1
            return None
        return self._writer.views(committed)

    def _has_space(self) -> bool:
        if not super()._has_space():
            return False
        return self._writer.has_room(self.committed) or bool(self._words[W_STATE] & STOPS_PRODUCER)

    def commit(self, *, version: int = 0, step: int = 0) -> None:
        committed = self.committed
        if self._reserved != committed:
            self._refuse_commit()
        self._writer.store(committed)
        super().commit(version=version, step=step)

    def push(
        self, values: Mapping[str, npt.ArrayLike], *, version: int = 0, step: int = 0, timeout_s: float | None = None
    ) -> bool:
        slot = self.reserve(timeout_s)
        if slot is None:
            return False
        if values.keys() != slot.keys():
            refuse_fields(self._memory.name, slot, values)
        arrays = {name: check_field(self._memory.name, name, view, values[name]) for name, view in slot.items()}
        for name, view in slot.items():
            view[...] = arrays[name]
        self.commit(version=version, step=step)
        return True

    def close(self) -> None:
        super().close()
        self._writer.drop()


class CompactSpan(Span):
    """A span whose paired observations are views of the slots before, or, where an episode began, of private memory.

    ``writable`` holds the same arrays by name, of the same memory and not marked read-only, for libraries whose arrays
    cannot be; nobody may write into them.
    """

    __slots__ = ("writable",)

    writable: dict[str, Array]

    def replace(self, writable: dict[str, Array]) -> None:
        """Set the arrays."""
        self.writable = writable
        self.clear()
        for name, array in writable.items():
            view = array.view()
            view.flags.writeable = False
            self[name] = view

    def drop(self) -> None:
        super().drop()
        self.writable.clear()


class _Reader:
    """The consumer's view of a compact ring's memory."""

    def __init__(self, memory: RingMemory, layout: CompactLayout) -> None:
        self._layout = layout
        self._num_slots = memory.capacity
        self._stored = build_arrays(memory.schema, memory.capacity, memory.data)
        self._side = layout.build_side(memory.capacity - 1, memory.data)
        self._metadata = build_metadata(memory.capacity, memory.data.toreadonly())
        # Address space only, until episodes begin.
        self._patched = {
            name: np.empty((self._num_slots, *self._stored[following].shape[1:]), self._stored[following].dtype)
            for name, following in layout.pairs.items()
        }
        self._spans: dict[tuple[int, int, bool], CompactSpan] = {}

    def span(self, start: int, num_slots: int) -> CompactSpan:
        """The plain slots from index ``start``; with ``start`` 0 it is one slot, since its predecessor lies at the end."""
        stop = start + num_slots
        begun = np.flatnonzero(self._stored[EXTENT][start:stop, 1])
        key = (start, num_slots, len(begun) > 0)
        span = self._spans.get(key) or self._make(*key)
        if len(begun):
            self._patch(start, num_slots, begun)
        return span

    def _make(self, start: int, num_slots: int, patched: bool) -> CompactSpan:
        if len(self._spans) >= MAX_SPANS:
            self._spans.clear()
        span = CompactSpan({}, self._metadata, start, start + num_slots)
        arrays: dict[str, Array] = {}
        for name in self._layout.schema.names:
            if name not in self._layout.pairs:
                arrays[name] = self._stored[name][start : start + num_slots]
            elif patched:
                arrays[name] = self._patched[name][:num_slots]
            else:
                arrays[name] = self._before(name, start, num_slots)
        span.replace(arrays)
        self._spans[start, num_slots, patched] = span
        return span

    def _before(self, name: str, start: int, num_slots: int) -> Array:
        """The next observations of the slots before."""
        first = start - 1 if start else self._num_slots - 1
        return self._stored[self._layout.pairs[name]][first : first + num_slots]

    def _patch(self, start: int, num_slots: int, begun: npt.NDArray[np.intp]) -> None:
        for name, side in self._side.items():
            out = self._patched[name]
            np.copyto(out[:num_slots], self._before(name, start, num_slots))
            for slot in begun:
                rows = np.flatnonzero(self._stored[BEGINS][start + slot])
                first, count = self._stored[EXTENT][start + slot]
                out[slot, rows] = side[(first + np.arange(count)) % len(side)]

    def drop(self) -> None:
        """Forget the memory, also that of spans which were given out."""
        for span in self._spans.values():
            span.drop()
        self._spans.clear()
        self._stored, self._side, self._patched = {}, {}, {}
        self._metadata = np.empty((0, 1), np.int64)


class CompactConsumer(Consumer):
    """The reading end of a :class:`CompactRing`: the same fields and bytes as from a plain ring.

    Where no episode began in a span its observations are views of the ring; otherwise they are copied to private memory,
    which the next :meth:`peek` overwrites.
    """

    def __init__(self, memory: RingMemory, layout: CompactLayout) -> None:
        super().__init__(memory)
        self._reader = _Reader(memory, layout)

    def peek(self, max_slots: int | None = None) -> CompactSpan | None:
        """As :meth:`Consumer.peek`; a run also ends after the first slot of the memory."""
        stored = super().peek(max_slots)
        if stored is None:
            return None
        return self._reader.span(stored.start, stored.num_slots if stored.start else 1)

    def close(self) -> None:
        super().close()
        self._reader.drop()
