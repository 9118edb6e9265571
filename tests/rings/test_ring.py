"""What the conformance suite does not ask of every ring: ownership, forks, leads, waiting on many, closing from
outside.
"""

from __future__ import annotations

import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from numa_collectors import _futex
from numa_collectors.errors import NumaCollectorsError, PeerLostError, RingClosedError, SchemaMismatchError
from numa_collectors.rings import CompactRing, Consumer, Field, Producer, Schema, TransitionRing, wait_any
from numa_collectors.rings import consumer as consumer_module
from numa_collectors.rings import endpoint as endpoint_module
from numa_collectors.rings.layout import W_CONSUMER_ASLEEP, W_PRODUCER_ASLEEP
from numa_collectors.testing.ring import PLANTED_SCHEMA, check_planted, plant, planted

SMALL = Schema([Field("x", "int64")])
SOON_S = 20.0
LATE_S = 3 * SOON_S  # a wait that only its time limit ended must not look like one that was woken


@pytest.fixture(autouse=True)
def _no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep until woken: the look after a quarter of a second would hide a lost wake-up."""
    monkeypatch.setattr(endpoint_module, "MAX_SLEEP_S", LATE_S)


def put(producer: Producer, value: int) -> bool:
    return producer.push({"x": np.asarray(value)}, step=value, timeout_s=0)


def in_thread(action: Callable[[], object], until_asleep: Callable[[], bool]) -> tuple[threading.Thread, list[object]]:
    """Run ``action`` in a thread, and return once it sleeps in the kernel."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(action())
        except NumaCollectorsError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + SOON_S
    while not until_asleep():
        assert time.monotonic() < deadline, "it never went to sleep"
    return thread, outcome


def asleep(ring: TransitionRing, word: int) -> Callable[[], bool]:
    return lambda: bool(ring._memory.words[word])


def test_a_second_live_producer_is_refused() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        ring.producer()
        with pytest.raises(NumaCollectorsError, match=rf"live producer already \(pid {os.getpid()}\)"):
            ring.producer(generation=1)


def test_a_second_live_consumer_is_refused() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        first = ring.consumer()
        with pytest.raises(NumaCollectorsError, match="live consumer already"):
            ring.consumer()
        first.close()
        ring.consumer()


def test_a_successor_needs_a_higher_generation() -> None:
    with TransitionRing.create(SMALL, capacity=4) as ring:
        first = ring.producer(generation=3)
        put(first, 7)
        first.close()
        with pytest.raises(ValueError, match="generation 3"):
            ring.producer(generation=3)
        second, consumer = ring.producer(generation=4), ring.consumer()
        assert second.committed == 1
        assert put(second, 8)
        span = consumer.peek()
        assert span is not None
        assert span["x"].tolist() == [7, 8]
        assert span.generations.tolist() == [3, 4]
        consumer.release(2)
        assert not consumer.closed, "the predecessor's close must not end the successor's stream"


def test_a_recycled_pid_is_not_taken_for_the_holder() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        first = ring.producer()
        words = ring._memory.words
        words[first._claim + 1] -= 1  # same pid, another start time
        ring.producer(generation=1)


def refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except (NumaCollectorsError, ValueError):
        return True
    except BaseException:  # noqa: BLE001 - a forked child must not run the rest of the suite
        return False
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_ends_are_refused_in_a_forked_child() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        put(producer, 1)
        assert consumer.peek() is not None
        pid = os.fork()
        if pid == 0:
            actions = (lambda: put(producer, 2), consumer.peek, lambda: consumer.release(1), ring.consumer)
            os._exit(sum(refused(action) for action in actions))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
        assert ring.committed == 1
        assert ring.released == 0


def test_the_lead_is_capped_below_the_capacity() -> None:
    with TransitionRing.create(SMALL, capacity=8, max_lead_slots=2) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        assert [put(producer, value) for value in range(3)] == [True, True, False]
        assert consumer.peek() is not None
        consumer.release(1)
        assert [put(producer, value) for value in range(2, 4)] == [True, False]


def test_commit_without_a_slot_and_release_of_too_much_are_errors() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        with pytest.raises(RuntimeError, match="without a slot"):
            producer.commit()
        put(producer, 1)
        with pytest.raises(ValueError, match=r"release\(1\)"):
            consumer.release(1)  # not peeked yet
        consumer.peek()
        with pytest.raises(ValueError, match=r"release\(2\)"):
            consumer.release(2)
        with pytest.raises(ValueError, match=r"release\(-1\)"):
            consumer.release(-1)
        with pytest.raises(ValueError, match="max_slots"):
            consumer.peek(0)


def test_casts_within_a_kind_are_done_and_others_refused() -> None:
    schema = Schema([Field("x", "float32", (2,))])
    with TransitionRing.create(schema, capacity=2) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        assert producer.push({"x": [1.5, 2.5]})
        span = consumer.peek()
        assert span is not None
        assert span["x"].tolist() == [[1.5, 2.5]]
        with pytest.raises(NumaCollectorsError, match=r"expected float32\[2\], got complex128\[2\]"):
            producer.push({"x": np.zeros(2, np.complex128)})


def test_a_container_that_was_pushed_before_is_looked_at_again() -> None:
    schema = Schema([Field("x", "float32", (2,)), Field("y", "float32", (2,))])
    with TransitionRing.create(schema, capacity=4) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        growing, steady = [1.0, 2.0], np.zeros(2, np.float32)
        assert producer.push({"x": growing, "y": steady})
        growing.pop()
        with pytest.raises(NumaCollectorsError, match=r"'x': expected float32\[2\], got float64\[1\]"):
            producer.push({"x": growing, "y": steady})
        with pytest.raises(NumaCollectorsError, match=r"'y': expected float32\[2\], got float64\[1\]"):
            producer.push({"x": steady, "y": growing})
        steady[...] = 5
        assert producer.push({"x": steady, "y": steady})
        span = consumer.peek()
        assert span is not None
        assert span["y"].tolist() == [[0.0, 0.0], [5.0, 5.0]]


def test_arrays_pushed_again_and_again_arrive_as_they_are_at_each_push() -> None:
    schema = Schema([Field("x", "float32", (2, 3)), Field("done", "bool", (2,)), Field("half", "float16")])
    with TransitionRing.create(schema, capacity=32) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        exact = np.zeros((2, 3), np.float32)
        cast, strided = np.zeros((2, 3), np.float64), np.zeros((3, 2), np.float32).T
        done, half = np.zeros(2, bool), np.zeros((), np.float16)
        number = 0
        for x in (exact, cast, strided, exact):
            for _ in range(4):
                number += 1
                x[...] = np.arange(6).reshape(2, 3) + number
                done[...] = (number % 2 == 0, number % 3 == 0)
                half[...] = number / 4
                assert producer.push({"x": x, "done": done, "half": half}, timeout_s=0)
        with pytest.raises(NumaCollectorsError, match=r"'done': expected bool\[2\], got bool\[3\]"):
            producer.push({"x": exact, "done": np.zeros(3, bool), "half": half})
        span = consumer.peek()
        assert span is not None
        numbers = np.arange(1, number + 1)
        np.testing.assert_array_equal(span["x"], numbers[:, None, None] + np.arange(6).reshape(2, 3))
        np.testing.assert_array_equal(span["done"], np.stack([numbers % 2 == 0, numbers % 3 == 0], axis=1))
        np.testing.assert_array_equal(span["half"], numbers / 4)


@pytest.mark.parametrize("ring_type", [TransitionRing, CompactRing])
def test_a_source_arrives_as_it_is_at_each_push_whoever_it_was_made_for(ring_type: type[TransitionRing]) -> None:
    with ring_type.create(PLANTED_SCHEMA, capacity=3) as ring, ring_type.create(PLANTED_SCHEMA, capacity=2) as other:
        producer, consumer = ring.producer(), ring.consumer()
        arrays = planted(0)
        reordered = {name: arrays[name] for name in reversed(arrays)}
        sources = [producer.source(reordered), other.producer().source(arrays), arrays]
        for index in range(11):  # several laps, so that every source has met every slot
            plant(arrays, index)
            assert producer.push(sources[index % 3], version=index // 7, step=index, timeout_s=0)
            plant(arrays, 999)
            span = consumer.peek()
            check_planted(span, index)
            consumer.release(1)
        assert dict(producer.source(arrays)).keys() == arrays.keys()
        assert producer.source(arrays)["obs"] is arrays["obs"]


@pytest.mark.parametrize("ring_type", [TransitionRing, CompactRing])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"obs": None}, r"missing \['obs'\], unknown \[\]"),
        ({"extra": np.zeros(1)}, r"missing \[\], unknown \['extra'\]"),
        ({"obs": np.zeros(16, np.float32)}, r"'obs': a source needs a numpy array float32\[17\], got float32\[16\]"),
        ({"obs": np.zeros(17)}, r"'obs': a source needs a numpy array float32\[17\], got float64\[17\]"),
        ({"obs": [0.0] * 17}, r"'obs': a source needs a numpy array float32\[17\], got list"),
        (
            {"frame": np.zeros((13, 5), np.uint8).T},
            r"'frame': a source needs a C-contiguous array, got strides \(1, 5\)",
        ),
    ],
)
def test_a_source_that_cannot_be_copied_by_its_bytes_is_refused(
    ring_type: type[TransitionRing], change: dict[str, Any], message: str
) -> None:
    values = {name: value for name, value in {**planted(0), **change}.items() if value is not None}
    with ring_type.create(PLANTED_SCHEMA, capacity=2) as ring, pytest.raises(SchemaMismatchError, match=message):
        ring.producer().source(values)


def test_metadata_travel_with_the_slot() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        producer, consumer = ring.producer(generation=5), ring.consumer()
        before = time.monotonic_ns()
        producer.push({"x": 1}, version=2**62, step=-3)
        span = consumer.peek()
        assert span is not None
        assert (span.versions[0], span.steps[0], span.generations[0]) == (2**62, -3, 5)
        assert before <= span.timestamps_ns[0] <= time.monotonic_ns()
        assert list(span) == ["x"]
        assert len(span) == 1


def test_a_handle_is_pickled_only_for_a_child_that_is_being_spawned() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring, pytest.raises(RuntimeError):
        pickle.dumps(ring)


def test_closing_twice_and_with_views_in_hand() -> None:
    ring = TransitionRing.create(SMALL, capacity=2)
    producer, consumer = ring.producer(), ring.consumer()
    slot = producer.try_reserve()
    put(producer, 1)
    span = consumer.peek()
    assert slot is not None
    assert span is not None
    array = span["x"]
    with pytest.raises(BufferError):
        ring.close()
    del array
    ring.close()  # the slot and the span that are still in scope keep nothing mapped
    ring.close()
    assert ring.region.closed
    assert len(span) == 0
    assert len(slot) == 0
    assert span.versions.size == 0
    with pytest.raises(NumaCollectorsError, match="closed"):
        producer.try_reserve()
    with pytest.raises(NumaCollectorsError, match="closed"):
        consumer.wait(1)


@pytest.mark.parametrize("end", ["shut", "lost"])
def test_a_sleeping_consumer_is_woken_by_the_parent(end: str) -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        ring.producer()
        consumer = ring.consumer()
        thread, outcome = in_thread(lambda: consumer.wait(LATE_S), asleep(ring, W_CONSUMER_ASLEEP))
        ring.shut() if end == "shut" else ring.set_producer_lost()
        thread.join(SOON_S)
        assert isinstance(outcome[0], RingClosedError if end == "shut" else PeerLostError)
        assert consumer.peer_lost == (end == "lost")


def test_a_commit_wakes_a_sleeping_consumer() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        thread, outcome = in_thread(lambda: consumer.wait(LATE_S), asleep(ring, W_CONSUMER_ASLEEP))
        put(producer, 1)
        thread.join(SOON_S)
        assert outcome == [True]


def test_a_release_wakes_a_sleeping_producer() -> None:
    with TransitionRing.create(SMALL, capacity=1) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        put(producer, 1)
        consumer.peek()
        thread, outcome = in_thread(
            lambda: put(producer, 2) or producer.reserve(LATE_S), asleep(ring, W_PRODUCER_ASLEEP)
        )
        consumer.release(1)
        thread.join(SOON_S)
        assert outcome
        assert outcome[0] is not None


@pytest.mark.parametrize("end", ["shut", "lost"])
def test_a_sleeping_producer_is_woken_by_the_parent(end: str) -> None:
    with TransitionRing.create(SMALL, capacity=1) as ring:
        producer = ring.producer()
        ring.consumer()
        put(producer, 1)
        thread, outcome = in_thread(lambda: producer.reserve(LATE_S), asleep(ring, W_PRODUCER_ASLEEP))
        ring.shut() if end == "shut" else ring.set_consumer_lost()
        thread.join(SOON_S)
        assert isinstance(outcome[0], RingClosedError if end == "shut" else PeerLostError)


def test_a_successor_revives_what_was_declared_lost() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        first, consumer = ring.producer(), ring.consumer()
        first.close()
        ring.set_producer_lost()
        assert consumer.closed
        second = ring.producer(generation=1)
        assert not consumer.closed
        put(second, 1)
        assert consumer.wait(0)
        assert second.peer_running
        assert consumer.peer_running
        second.close()
        assert not consumer.peer_running


def many(count: int) -> tuple[list[TransitionRing], list[Producer], list[Consumer]]:
    rings = [TransitionRing.create(SMALL, capacity=2) for _ in range(count)]
    return rings, [ring.producer() for ring in rings], [ring.consumer() for ring in rings]


@pytest.mark.parametrize("way", ["futex_waitv", "bell", "slices"])
@pytest.mark.parametrize("ready", [0, 2])
def test_wait_any_sleeps_until_one_is_ready(monkeypatch: pytest.MonkeyPatch, way: str, ready: int) -> None:
    rings = [TransitionRing.create(SMALL, capacity=2) for _ in range(3)]
    if way == "futex_waitv" and not _futex.futex_waitv_available():
        pytest.skip("the kernel has no futex_waitv")
    if way != "futex_waitv":
        monkeypatch.setattr(consumer_module, "futex_waitv_available", lambda: False)
    if way == "bell":
        TransitionRing.share_bell(rings)
    producers, consumers = [ring.producer() for ring in rings], [ring.consumer() for ring in rings]
    assert not wait_any(consumers, 0)
    assert not wait_any(consumers, 0.01)
    thread, outcome = in_thread(lambda: wait_any(consumers, LATE_S), asleep(rings[ready], W_CONSUMER_ASLEEP))
    put(producers[ready], 1)
    thread.join(SOON_S)
    assert outcome == [True]
    assert [consumer.fill for consumer in consumers] == [int(index == ready) for index in range(3)]
    assert all(not ring._memory.words[W_CONSUMER_ASLEEP] for ring in rings)
    for ring in rings:
        ring.close()


def test_wait_any_takes_a_closed_ring_for_ready() -> None:
    rings, producers, consumers = many(2)
    thread, outcome = in_thread(lambda: wait_any(consumers, LATE_S), asleep(rings[1], W_CONSUMER_ASLEEP))
    producers[1].close()
    thread.join(SOON_S)
    assert outcome == [True]
    assert [consumer.closed for consumer in consumers] == [False, True]
    for ring in rings:
        ring.close()
    with pytest.raises(ValueError, match="at least one"):
        wait_any([])


def test_a_sleeper_costs_no_cpu() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        consumer = ring.consumer()
        start = time.thread_time()
        assert not consumer.wait(1.0)
        assert time.thread_time() - start < 0.1, "waiting burns the core"


def test_steady_state_has_no_page_faults() -> None:
    schema = Schema([Field("x", "uint8", (64 << 10,))])
    with TransitionRing.create(schema, capacity=16) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        value, copy = {"x": np.ones(64 << 10, np.uint8)}, np.ones((1, 64 << 10), np.uint8)

        def lap() -> int:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(16):
                producer.push(value)
                span = consumer.peek(1)
                assert span is not None
                copy[...] = span["x"]
                consumer.release(1)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

        lap()
        assert sum(lap() for _ in range(20)) <= 4, "16 laps of 20 pages a slot touched fresh pages"
