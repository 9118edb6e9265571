"""How many slots a waiting learner lets come together."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from numa_collectors.exchange import Exchange
from numa_collectors.rings import Field, Producer, Schema, TransitionRing

CAPACITY = 16


class Desk:
    """An exchange over two rings, and their producers in the same process."""

    def __init__(self) -> None:
        schema = Schema([Field("reward", "float32")]).with_leading(2)
        self.rings = [TransitionRing.create(schema, capacity=CAPACITY, name=f"wait-{rank}") for rank in range(2)]
        self.producers: list[Producer] = [ring.producer() for ring in self.rings]
        self.exchange = Exchange(self.rings, [])
        self.naps = 0

    def commit(self, rank: int, num_slots: int = 1) -> None:
        for _ in range(num_slots):
            slot = self.producers[rank].try_reserve()
            assert slot is not None
            slot["reward"][:] = 0.0
            self.producers[rank].commit()

    @property
    def fill(self) -> int:
        return sum(consumer.fill for consumer in self.exchange.consumers)

    def nap(self, seconds: float) -> None:
        self.naps += 1

    def close(self) -> None:
        for producer in self.producers:
            producer.close()
        self.exchange.close()
        for ring in self.rings:
            ring.close()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    desk = Desk()
    # A nap of no length: what happens meanwhile is what a test makes happen.
    monkeypatch.setattr(time, "sleep", lambda seconds: desk.nap(seconds))
    yield desk
    desk.close()


def test_slots_come_together_over_all_rings(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.commit(0)
    monkeypatch.setattr(time, "sleep", lambda seconds: desk.commit(1))
    assert desk.exchange.wait(1.0, min_slots=3)
    assert desk.fill == 3


def test_one_slot_is_enough_where_no_more_were_asked_for(desk: Desk) -> None:
    desk.commit(1)
    assert desk.exchange.wait(1.0)
    assert (desk.naps, desk.fill) == (0, 1)


def test_a_ring_that_is_half_full_is_not_kept_waiting(desk: Desk) -> None:
    desk.commit(0, CAPACITY // 2)
    assert desk.exchange.wait(1.0, min_slots=100)
    assert desk.naps == 0


def test_what_does_not_come_is_not_waited_for(desk: Desk) -> None:
    assert not desk.exchange.wait(0.0, min_slots=4)
    desk.commit(0)
    assert desk.exchange.wait(1.0, min_slots=4)
    assert desk.naps == 5
