"""Single-producer single-consumer rings of transitions in shared memory.

Guarantees
    * Every committed slot is delivered exactly once, whole, in order; nothing is dropped: a full ring makes its
      producer wait.
    * A process that is killed at any point holds nothing that the other side waits for.  Committed slots survive it,
      a slot reserved and not committed is never delivered, and a successor goes on at the cursor.
    * An exception between any two instructions of an end, as of Ctrl-C in a notebook, leaves a slot committed or not and
      slots released or not; the end can be used on.
    * No wake-up is lost: whoever sleeps said so, fenced and looked again before; whoever publishes fences before
      asking.

Assumes
    * Each cursor is an aligned 8-byte word of shared memory, written by one side only with a single store (CPython's
      ``memoryview.cast("q")`` item assignment compiles to one).  ``struct.pack_into`` would not do: it zero-fills
      first.
    * x86-64: stores are seen in program order and loads are not reordered with loads, so data are visible before the
      cursor that covers them, and read before the release that gives them back.  A copy's non-temporal stores are
      fenced by the C library at its end.  Elsewhere a full fence (:mod:`numa_collectors._futex`) stands between data
      and cursor on both sides, and between a cursor and the data it covers.
    * Both: a store followed by a load of another word (publish, then "is anybody asleep?") is fenced explicitly.
    * Cursors are 64-bit counters and never wrap.

Not covered
    * Two processes that open the same end in the same instant; a supervisor starts a successor after the
      predecessor's death.
    * Writing into a slot's views after ``commit``, reading a span's views after ``release``.

The argument is checked by exhaustion for small rings, including store buffers, in :mod:`numa_collectors.testing.model`.
"""

from __future__ import annotations

from collections.abc import Mapping

from numa_collectors.rings._compact_ends import CompactSpan
from numa_collectors.rings._compact_layout import observation_pairs
from numa_collectors.rings.compact import CompactRing
from numa_collectors.rings.consumer import Consumer, Span, wait_any
from numa_collectors.rings.producer import Producer, Source
from numa_collectors.rings.ring import TransitionRing
from numa_collectors.rings.schema import Field, Schema

__all__ = [
    "RING_LAYOUTS",
    "CompactRing",
    "CompactSpan",
    "Consumer",
    "Field",
    "Producer",
    "Schema",
    "Source",
    "Span",
    "TransitionRing",
    "observation_pairs",
    "wait_any",
]

RING_LAYOUTS: Mapping[str, type[TransitionRing]] = {"plain": TransitionRing, "compact": CompactRing}
"""The rings that a run can have, by the name in its configuration."""
