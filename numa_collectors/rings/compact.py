"""A ring that stores each observation once: about half the bytes where observations are most of a slot.

A transition's ``next_obs`` is the ``obs`` of the transition after it, except where an episode ends.  So a slot holds its
next observations in full and no observations: those are the next observations of the slot before it.  Rows for which that
is not so (an episode began, a successor took over, the very first slot) have their observations in a *side area*, in rows
that belong to the slot and are free again when it is released.  Which rows these are is found by comparing bytes when the
slot is committed.

Guarantees
    * What is read is what was written, bit for bit, whatever the collector does and in every autoreset mode: nothing is
      inferred from ``terminated`` or ``truncated``, and a row that does not continue is merely stored twice.
    * The guarantees of :class:`TransitionRing` hold unchanged.  A committed slot is complete: all that it consists of was
      written before its commit.  It waits for no successor, so a killed producer costs no transition, and the last slot
      before an end needs no closing record.  (Stored the other way round, observations in full and last ones aside, each
      slot would lack its next observations until the following one came.)
    * Full means that the environment is not stepped: a slot can be reserved only when the side area could take every row
      of it, however many episodes end at once.  An empty ring always has that room, so nobody waits for ever.

Assumes
    * A producer leads by at most one slot less than the memory holds, so that the slot before the oldest unreleased one is
      never overwritten: the ring has one slot more than its capacity for this.
    * The rows of the side area are used in the order of commits and freed in the order of releases; each slot's record says
      which are its own.  The record is read back by a successor, so nothing is known to a producer alone.

Not covered
    * Very short episodes (of 16 slots in a ring of 64) fill the side area first, and the producer leads by less than the
      capacity.
"""

from __future__ import annotations

import bisect

from numa_collectors.rings._compact_ends import CompactConsumer, CompactProducer
from numa_collectors.rings._compact_layout import CompactLayout
from numa_collectors.rings.layout import DEFAULT_MAX_BYTES, DEFAULT_MAX_SLOTS, HEADER_BYTES, choose_capacity, ring_bytes
from numa_collectors.rings.ring import RingPlan, SharedBell, TransitionRing
from numa_collectors.rings.schema import Schema
from numa_collectors.shm import Region

__all__ = ["CompactRing"]

_MIN_SLOTS = 2


class CompactRing(TransitionRing):
    """A :class:`TransitionRing` for schemas with a field ``x`` beside ``next_x``, in about half the bytes.

    Every field's first dimension counts the environments (``Schema.with_leading``).  It is written and read like the plain
    one and gives the same bytes; its memory holds one slot more than the capacity, and the side area.
    """

    def __init__(self, region: Region, schema: Schema, name: str, bell: SharedBell | None = None) -> None:
        """Attach to the compact ring of ``schema`` in ``region``; SchemaMismatchError when it holds something else."""
        self._layout = CompactLayout(schema)
        super().__init__(region, self._layout.stored, name, bell)
        self.schema = schema
        self.capacity -= 1

    @classmethod
    def plan(cls, schema: Schema, *, capacity: int | None = None, max_bytes: int | None = None) -> RingPlan:
        layout = CompactLayout(schema)
        # For what it refuses; the choice itself must reckon with the side area.
        choose_capacity(layout.stored, capacity, max_bytes)
        if capacity is not None and max_bytes is None:
            return _plan(layout, capacity)
        limit = DEFAULT_MAX_BYTES if max_bytes is None else max_bytes
        slots = range(1, (DEFAULT_MAX_SLOTS if capacity is None else capacity) + 1)
        # As for a plain ring, the header does not count.
        fitting = bisect.bisect_right(slots, limit + HEADER_BYTES, key=lambda count: _plan(layout, count).num_bytes)
        if not fitting and max_bytes is not None:
            least = _plan(layout, 1).num_bytes - HEADER_BYTES
            raise ValueError(
                f"max_bytes={max_bytes} holds no compact ring: one slot takes {least} bytes; raise max_bytes"
            )
        return _plan(layout, max(fitting, _MIN_SLOTS if max_bytes is None else 1))

    def producer(self, generation: int = 0) -> CompactProducer:
        end = CompactProducer(self._memory, self._layout, generation)
        self._ends.append(end)
        return end

    def consumer(self) -> CompactConsumer:
        end = CompactConsumer(self._memory, self._layout)
        self._ends.append(end)
        return end


def _plan(layout: CompactLayout, capacity: int) -> RingPlan:
    num_bytes = ring_bytes(layout.stored, capacity + 1) + layout.side_bytes(capacity)
    return RingPlan(layout.stored, capacity + 1, capacity, num_bytes)
