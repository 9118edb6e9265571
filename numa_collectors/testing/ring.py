"""Conformance suite of rings: what any single-producer single-consumer ring of slots must do.

Subclass :class:`RingConformance` in a pytest module, override :meth:`RingConformance.make_ring`, and run it.  A ring
under test offers what :class:`numa_collectors.rings.TransitionRing` offers: ``producer(generation)``, ``consumer()``,
``close()``, ``set_producer_lost()``, and pickling while a child is spawned.
"""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from numa_collectors.errors import PeerLostError, RingClosedError, SchemaMismatchError
from numa_collectors.rings import Field, Schema
from numa_collectors.testing.processes import CHILD_TIMEOUT_S, block_until_killed, child, fail, raises

__all__ = ["PLANTED_SCHEMA", "RingConformance", "check_planted", "mirror", "plant", "planted"]

PLANTED_SCHEMA = Schema(
    [
        Field("obs", "float32", (17,)),
        Field("frame", "uint8", (5, 13)),
        Field("reward", "float64"),
        Field("done", "bool", (3,)),
        Field("next_obs", "float32", (17,)),
    ]
)
"""Fields of odd sizes, so that padding and alignment are exercised; ``next_obs`` is mostly the following slot's ``obs``."""


def _following(index: Any) -> Any:
    """``next_obs`` of the slots ``index``, ``(..., 17)``: as if one row's episode ended in every third slot."""
    ended = (index % 3 == 0)[..., None] & (np.arange(17) == (index % 17)[..., None])
    return np.where(ended, -1, ((index + 1) % 9973)[..., None])


def planted(index: int) -> dict[str, Any]:
    """Arrays whose every element follows from ``index``: a slot that mixes two indices is recognised."""
    return {
        "obs": np.full(17, index % 9973, np.float32),
        "frame": np.full((5, 13), index * 31 % 251, np.uint8),
        "reward": np.asarray(float(index)),
        "done": np.full(3, index % 2 == 1),
        "next_obs": _following(np.asarray(index)).astype(np.float32),
    }


def plant(slot: Any, index: int) -> None:
    """Write :func:`planted` in place."""
    slot["obs"][...] = index % 9973
    slot["frame"][...] = index * 31 % 251
    slot["reward"][...] = index
    slot["done"][...] = index % 2 == 1
    slot["next_obs"][...] = _following(np.asarray(index))


def check_planted(span: Any, first: int) -> None:
    """Fail unless ``span`` holds exactly the slots ``first, first + 1, ...``, whole."""
    index = np.arange(first, first + span.num_slots)
    checks = {
        "steps": span.steps == index,
        "versions": span.versions == index // 7,
        "obs": span["obs"] == (index % 9973)[:, None],
        "frame": span["frame"] == (index * 31 % 251)[:, None, None],
        "reward": span["reward"] == index,
        "done": span["done"] == (index % 2 == 1)[:, None],
        "next_obs": span["next_obs"] == _following(index),
    }
    for name, equal in checks.items():
        if not equal.all():
            fail(f"slots {first}..{first + span.num_slots - 1}: {name} is not what was planted: {span.steps.tolist()}")


def _push(producer: Any, index: int, timeout_s: float | None = 0) -> bool:
    return bool(producer.push(planted(index), version=index // 7, step=index, timeout_s=timeout_s))


def _produce(pipe: Connection, ring: Any, generation: int, end: int, stop: tuple[int, str] | None) -> None:
    """Commit slots up to ``end``; at slot ``stop[0]`` reach the state ``stop[1]`` and wait to be killed."""
    producer = ring.producer(generation)
    while producer.committed < end:
        index = producer.committed
        slot = producer.reserve(CHILD_TIMEOUT_S)
        if slot is None:
            fail("no space in time: a wake-up was lost")
        if stop is not None and index == stop[0] and stop[1] != "committed":
            if stop[1] == "half-written":
                slot["obs"][...] = -1
                slot["frame"][:2] = 255
            block_until_killed(pipe, index)
        plant(slot, index)
        producer.commit(version=index // 7, step=index)
        if stop is not None and (index, "committed") == stop:
            block_until_killed(pipe, index)
    producer.close()
    ring.close()


def _produce_freely(pipe: Connection, ring: Any, generation: int) -> None:
    """Commit slots until killed."""
    producer = ring.producer(generation)
    pipe.send("ready")
    while True:
        index = producer.committed
        _push(producer, index, CHILD_TIMEOUT_S)


def _consume(pipe: Connection, ring: Any, end: int, stop: int | None) -> None:
    """Check and release slots up to ``end``; with a slot at or after ``stop`` in hand, wait to be killed."""
    consumer = ring.consumer()
    while consumer.released < end:
        if not consumer.wait(CHILD_TIMEOUT_S):
            fail("no slot in time: a wake-up was lost")
        span = consumer.peek(3)
        check_planted(span, consumer.released)
        if stop is not None and consumer.released >= stop:
            block_until_killed(pipe, consumer.released)
        consumer.release(span.num_slots)
    del span
    consumer.close()
    ring.close()


def mirror(pipe: Connection, there: Any, back: Any, num_slots: int) -> None:
    """Send every slot that comes ``there`` ``back``."""
    consumer, producer = there.consumer(), back.producer()
    for _ in range(num_slots):
        if not consumer.wait(CHILD_TIMEOUT_S):
            fail("no slot in time: a wake-up was lost")
        span = consumer.peek(1)
        values = {name: span[name][0].copy() for name in span}
        version, step = int(span.versions[0]), int(span.steps[0])
        del span
        consumer.release(1)
        producer.push(values, version=version, step=step, timeout_s=CHILD_TIMEOUT_S)
    producer.close()
    there.close()
    back.close()


class RingConformance:
    """Tests of one ring implementation.  ``num_slots`` is how many the two-process runs move."""

    num_slots = 100_000
    num_handovers = 2_000

    def make_ring(self, schema: Schema, capacity: int) -> Any:
        """Make a ring; the suite closes it."""
        raise NotImplementedError

    def test_empty_ring_has_nothing(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 3) as ring:
            consumer = ring.consumer()
            if consumer.peek() is not None or consumer.wait(0) or consumer.fill or consumer.closed:
                fail("an empty ring offered something")

    def test_order_and_content_over_many_laps(self) -> None:
        for capacity in (1, 2, 3, 7):
            with self.make_ring(PLANTED_SCHEMA, capacity) as ring:
                self._random_walk(ring, capacity, random.Random(capacity))

    def _random_walk(self, ring: Any, capacity: int, rng: random.Random) -> None:
        producer, consumer = ring.producer(), ring.consumer()
        pushed = 0
        while consumer.released < 40 * capacity:
            for _ in range(rng.randint(0, capacity + 1)):
                done = _push(producer, pushed)
                if done != (pushed - consumer.released < capacity):
                    fail(f"push said {done} with {pushed - consumer.released} of {capacity} slots in use")
                pushed += done
            span = consumer.peek(rng.choice((None, 1, 2)))
            if (span is None) != (pushed == consumer.released):
                fail("peek and the number of committed slots disagree")
            if span is not None:
                check_planted(span, consumer.released)
                consumer.release(rng.randint(0, span.num_slots))

    def test_full_ring_refuses_without_loss(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 2) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            if not (_push(producer, 0) and _push(producer, 1)):
                fail("an empty ring of two slots refused one of them")
            if producer.try_reserve() is not None or _push(producer, 2) or producer.reserve(0.001) is not None:
                fail("a full ring took a slot")
            check_planted(consumer.peek(), 0)
            consumer.release(1)
            if not _push(producer, 2):
                fail("a released slot was not given back")
            check_planted(consumer.peek(1), 1)

    def test_spans_are_read_only(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 2) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            _push(producer, 0)
            span = consumer.peek()
            with raises(ValueError):
                span["obs"][...] = 0

    def test_sources_may_be_reused_after_push(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            source = planted(0)
            for index in range(4):
                plant(source, index)
                producer.push(source, version=index // 7, step=index, timeout_s=0)
            plant(source, 999)
            check_planted(consumer.peek(), 0)

    def test_uncommitted_slot_is_not_delivered(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            plant(producer.try_reserve(), 5)
            if consumer.peek() is not None:
                fail("a slot was delivered before its commit")
            plant(producer.try_reserve(), 0)
            producer.commit(version=0, step=0)
            check_planted(consumer.peek(), 0)

    def test_wrong_values_commit_nothing(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            good = planted(0)
            wrong: list[dict[str, Any]] = [
                {name: good[name] for name in good if name != "obs"},
                {**good, "extra": 0},
                {**good, "obs": np.zeros(16, np.float32)},
                {**good, "obs": np.zeros((1, 17), np.float32)},
                {**good, "frame": np.zeros((5, 13), np.float32)},
            ]
            for values in wrong:
                with raises(SchemaMismatchError):
                    producer.push(values, timeout_s=0)
            if consumer.peek() is not None:
                fail("a refused push committed a slot")

    def test_closing_delivers_the_rest_first(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            _push(producer, 0)
            producer.close()
            if not consumer.wait(0) or consumer.closed:
                fail("the last slot was lost by closing")
            check_planted(consumer.peek(), 0)
            consumer.release(1)
            if not consumer.closed:
                fail("a closed, empty ring does not say that it is closed")
            with raises(RingClosedError):
                consumer.wait(1)

    def test_closed_consumer_stops_the_producer(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            consumer.close()
            with raises(RingClosedError):
                _push(producer, 0)

    def test_lost_is_not_closed(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            _push(producer, 0)
            ring.set_producer_lost()
            check_planted(consumer.peek(), 0)
            consumer.release(1)
            with raises(PeerLostError):
                consumer.wait(1)
            ring.set_consumer_lost()
            with raises(PeerLostError):
                _push(producer, 1)

    def test_two_processes_lose_double_and_tear_nothing(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 61) as ring, child(_produce, ring, 0, self.num_slots, None) as producer:
            consumer = ring.consumer()
            while consumer.released < self.num_slots:
                if not consumer.wait(CHILD_TIMEOUT_S):
                    fail("no slot in time: a wake-up was lost")
                span = consumer.peek()
                check_planted(span, consumer.released)
                consumer.release(span.num_slots)
            with raises(RingClosedError):
                consumer.wait(CHILD_TIMEOUT_S)
            producer.join()

    def test_producer_killed_at_every_stage_of_a_slot(self) -> None:
        stages = ("reserved", "half-written", "committed")
        with self.make_ring(PLANTED_SCHEMA, 3) as ring:
            consumer = ring.consumer()
            for generation, stage in enumerate(stages):
                stop = 10 * (generation + 1)
                with child(_produce, ring, generation, 10**9, (stop, stage)) as producer:
                    last = stop + (stage == "committed")
                    self._read_until(consumer, last)
                    if producer.receive() != stop:
                        fail("the child stopped somewhere else")
                    producer.kill()
                if consumer.peek() is not None or ring.committed != last:
                    fail(f"killed {stage}: {ring.committed} slots are committed, expected {last}")
            with child(_produce, ring, len(stages), 50, None) as producer:
                self._read_until(consumer, 50)
                producer.join()

    def _read_until(self, consumer: Any, end: int) -> None:
        generation = -1
        while consumer.released < end:
            if not consumer.wait(CHILD_TIMEOUT_S):
                fail("no slot in time")
            span = consumer.peek()
            check_planted(span, consumer.released)
            if span.generations.min() < generation:
                fail("a slot of an older generation came after one of a newer")
            generation = int(span.generations.max())
            consumer.release(span.num_slots)

    def test_producers_killed_at_random(self) -> None:
        rng = random.Random(8)
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            consumer = ring.consumer()
            for generation in range(4):
                with child(_produce_freely, ring, generation) as producer:
                    producer.receive()
                    self._read_until(consumer, consumer.released + rng.randint(1, 400))
                    producer.kill()
                self._read_until(consumer, ring.committed)

    def test_consumer_killed_with_slots_in_hand(self) -> None:
        with self.make_ring(PLANTED_SCHEMA, 4) as ring:
            producer = ring.producer()
            with child(_consume, ring, 100, 20) as consumer:
                # Until it says so: a consumer that has caught up needs one more slot to have one in hand.
                while not consumer.pipe.poll():
                    _push(producer, producer.committed, 0.01)
                held = consumer.receive()
                consumer.kill()
            if ring.released != held:
                fail("slots that were in a dead consumer's hands are gone")
            with child(_consume, ring, 100, None) as consumer:
                while producer.committed < 100:
                    _push(producer, producer.committed, CHILD_TIMEOUT_S)
                consumer.join()

    def test_no_wake_up_is_lost_when_both_sides_sleep_in_turn(self) -> None:
        with (
            self.make_ring(PLANTED_SCHEMA, 1) as there,
            self.make_ring(PLANTED_SCHEMA, 1) as back,
            child(mirror, there, back, self.num_handovers) as process,
        ):
            producer, consumer = there.producer(), back.consumer()
            for index in range(self.num_handovers):
                _push(producer, index, CHILD_TIMEOUT_S)
                if not consumer.wait(CHILD_TIMEOUT_S):
                    fail("no slot in time: a wake-up was lost")
                check_planted(consumer.peek(), index)
                consumer.release(1)
            process.join()
