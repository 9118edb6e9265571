"""The ring itself: made once by the parent, handed to both sides, opened there."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from numa_collectors._futex import full_fence, require_fence
from numa_collectors.rings.consumer import Consumer
from numa_collectors.rings.endpoint import Doorbell, RingMemory
from numa_collectors.rings.layout import (
    B_CONSUMER_LOST,
    B_PRODUCER_LOST,
    B_RING_CLOSED,
    W_COMMITTED,
    W_CONSUMER_ASLEEP,
    W_PRODUCER_ASLEEP,
    W_RELEASED,
    check_header,
    choose_capacity,
    format_header,
    ring_bytes,
)
from numa_collectors.rings.producer import Producer
from numa_collectors.rings.schema import Schema
from numa_collectors.shm import Region, RegionPolicy

__all__ = ["RingPlan", "TransitionRing"]


class RingPlan(NamedTuple):
    """What a ring will take: ``stored`` is the schema of its ``num_stored`` slots in memory, of which a producer may lead
    by ``capacity``; ``num_bytes`` is the whole region's size.
    """

    stored: Schema
    num_stored: int
    capacity: int
    num_bytes: int


class SharedBell:
    """The region of a bell, unmapped with the last of the rings of this process that use it."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._num_users = 0

    def open(self) -> Doorbell:
        self._num_users += 1
        return Doorbell(self._region.buf, self._region.address)

    def drop(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._region.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (SharedBell, (self._region,))


class TransitionRing:
    """A bounded single-producer single-consumer queue of slots in shared memory.

    The object is a handle: pass it to a child while spawning it (by pickling), and open one end with :meth:`producer`
    or :meth:`consumer`.  Nothing is dropped: a full ring makes the producer wait.
    """

    def __init__(self, region: Region, schema: Schema, name: str, bell: SharedBell | None = None) -> None:
        """Attach to the ring of ``schema`` in ``region``; SchemaMismatchError when the region holds something else.

        Use :meth:`create` to make one.
        """
        require_fence("a TransitionRing")
        self.name = name
        self.schema = schema
        self.region = region
        self._bell = bell
        data = region.buf
        with data[: len(data) // 8 * 8].cast("q") as words:
            self.capacity, self.max_lead_slots = check_header(words, schema, len(data), name)
        self._memory = RingMemory(
            name,
            schema,
            self.capacity,
            self.max_lead_slots,
            data,
            region.address,
            None if bell is None else bell.open(),
        )
        self._ends: list[Producer | Consumer] = []
        self._open = True
        self._owner = False

    @classmethod
    def create(  # noqa: PLR0913 - what to hold, how much of it, and where
        cls,
        schema: Schema,
        *,
        capacity: int | None = None,
        max_bytes: int | None = None,
        max_lead_slots: int | None = None,
        node: int | None = None,
        policy: RegionPolicy = "bind",
        toucher_cpus: tuple[int, ...] | None = None,
        huge_pages: bool = False,
        name: str = "ring",
    ) -> TransitionRing:
        """Make a ring whose pages lie on ``node`` (None: anywhere) before anybody uses it.

        ``capacity`` counts slots, ``max_bytes`` bounds their bytes; with both the smaller holds, with neither 16 MiB
        and at most 256 slots (never fewer than 2).  ``max_lead_slots`` caps the slots that the producer may be ahead
        of the consumer's release below the capacity.  ``policy``, ``toucher_cpus`` and ``huge_pages``: see
        :class:`numa_collectors.shm.Region`. Raises NodeCapacityError when the memory is not there,
        NotImplementedError where no memory fence can be had.
        """
        require_fence("a TransitionRing")
        if not isinstance(schema, Schema):
            raise ValueError(f"expected a Schema, got {type(schema).__name__}")
        if max_lead_slots is not None and max_lead_slots < 1:
            raise ValueError(f"max_lead_slots must be at least 1, got {max_lead_slots}")
        plan = cls.plan(schema, capacity=capacity, max_bytes=max_bytes)
        region = Region.create(
            name,
            plan.num_bytes,
            node=node,
            policy=policy,
            toucher_cpus=toucher_cpus,
            huge_pages=huge_pages,
        )
        with region.buf[: region.size_bytes // 8 * 8].cast("q") as words:
            format_header(words, plan.stored, plan.num_stored, min(plan.capacity, max_lead_slots or plan.capacity))
        ring = cls(region, schema, name)
        ring._owner = True
        return ring

    @classmethod
    def plan(cls, schema: Schema, *, capacity: int | None = None, max_bytes: int | None = None) -> RingPlan:
        """Return what :meth:`create` would make, without making it."""
        slots = choose_capacity(schema, capacity, max_bytes)
        return RingPlan(schema, slots, slots, ring_bytes(schema, slots))

    @staticmethod
    def share_bell(rings: Sequence[TransitionRing]) -> None:
        """Give ``rings`` one bell, so that a consumer can sleep on all of them without futex_waitv(2).

        Call it before the rings are handed to other processes.  Needed on kernels before 5.16 and beyond 128 rings.
        """
        region = Region.create(f"bell-{uuid.uuid4().hex[:8]}", 4096)
        bell = Doorbell(region.buf, region.address)
        bell.found()
        bell.release()
        shared = SharedBell(region)
        for ring in rings:
            ring._bell = shared
            ring._memory.bell = shared.open()

    @property
    def committed(self) -> int:
        """Slots committed since the ring was made."""
        return int(self._memory.words[W_COMMITTED])

    @property
    def released(self) -> int:
        """Slots released since the ring was made."""
        return int(self._memory.words[W_RELEASED])

    @property
    def fill(self) -> int:
        """Slots committed and not yet released."""
        released = self.released
        return max(0, self.committed - released)

    def producer(self, generation: int = 0) -> Producer:
        """Open the writing end in this process; NumaCollectorsError while another live producer holds it."""
        end = Producer(self._memory, generation)
        self._ends.append(end)
        return end

    def consumer(self) -> Consumer:
        """Open the reading end in this process; NumaCollectorsError while another live consumer holds it."""
        end = Consumer(self._memory)
        self._ends.append(end)
        return end

    def set_producer_lost(self) -> None:
        """Declare the producer dead: a consumer that has read everything gets PeerLostError.  A successor undoes it."""
        self._say(B_PRODUCER_LOST)

    def set_consumer_lost(self) -> None:
        """Declare the consumer dead: the producer gets PeerLostError.  A successor undoes it."""
        self._say(B_CONSUMER_LOST)

    def shut(self) -> None:
        """End the ring for both sides and wake them, without unmapping: RingClosedError, after the last slot was
        read.
        """
        self._say(B_RING_CLOSED)

    def _say(self, state_byte: int) -> None:
        memory = self._memory
        memory.data[state_byte] = 1
        # Rare and possibly after a death: wake both sides whatever their words say.
        full_fence()
        memory.wake(W_CONSUMER_ASLEEP)
        memory.wake(W_PRODUCER_ASLEEP)

    def close(self) -> None:
        """Close the ends that were opened by this handle, and unmap.  May be called twice.

        In the process that made the ring this ends the ring for both sides (see :meth:`shut`).  Raises BufferError
        while arrays of a slot or span are still held; everything else is closed then, and a later call succeeds.
        """
        if self._open:
            self._open = False
            for end in self._ends:
                end.close()
            if self._owner:
                self.shut()
            self._memory.release()
        self.region.close()
        if self._bell is not None:
            self._bell.drop()
            self._bell = None

    def __enter__(self) -> TransitionRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.region, self.schema, self.name, self._bell))
