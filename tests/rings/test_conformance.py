"""The library's own ring under the suite that any ring must pass."""

from __future__ import annotations

from numa_collectors.rings import Schema, TransitionRing
from numa_collectors.testing.ring import RingConformance


class TestTransitionRing(RingConformance):
    def make_ring(self, schema: Schema, capacity: int) -> TransitionRing:
        return TransitionRing.create(schema, capacity=capacity)
