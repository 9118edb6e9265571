"""The library's own ring under the suite that any ring must pass."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest

from numa_collectors.rings import Schema, TransitionRing, endpoint
from numa_collectors.testing.processes import CHILD_TIMEOUT_S, child
from numa_collectors.testing.ring import PLANTED_SCHEMA, RingConformance, check_planted, mirror, planted


class TestTransitionRing(RingConformance):
    def make_ring(self, schema: Schema, capacity: int) -> TransitionRing:
        return TransitionRing.create(schema, capacity=capacity)


def mirror_without_a_second_look(pipe: Connection, there: TransitionRing, back: TransitionRing, num_slots: int) -> None:
    endpoint.MAX_SLEEP_S = 3 * CHILD_TIMEOUT_S
    mirror(pipe, there, back, num_slots)


@pytest.mark.parametrize("num_spins", [0, 3])
def test_no_wake_up_is_lost_between_two_processes(monkeypatch: pytest.MonkeyPatch, num_spins: int) -> None:
    """The look after a quarter of a second is out of the way on both sides, and so is most of the spinning here."""
    monkeypatch.setattr(endpoint, "MAX_SLEEP_S", 3 * CHILD_TIMEOUT_S)
    monkeypatch.setattr(endpoint, "NUM_SPINS", num_spins)
    count = 3000
    with (
        TransitionRing.create(PLANTED_SCHEMA, capacity=1) as there,
        TransitionRing.create(PLANTED_SCHEMA, capacity=1) as back,
        child(mirror_without_a_second_look, there, back, count) as process,
    ):
        producer, consumer = there.producer(), back.consumer()
        for index in range(count):
            assert producer.push(planted(index), version=index // 7, step=index, timeout_s=CHILD_TIMEOUT_S)
            assert consumer.wait(CHILD_TIMEOUT_S), "a wake-up was lost"
            check_planted(consumer.peek(), index)
            consumer.release(1)
        process.join()
