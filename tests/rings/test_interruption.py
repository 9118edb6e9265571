"""Ctrl-C between any two instructions of a ring's or a snapshot's end: nothing is lost, doubled or torn afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from numa_collectors.rings import CompactRing, Consumer, TransitionRing
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec
from numa_collectors.testing.ring import PLANTED_SCHEMA, check_planted, plant, planted
from tests.interruption import is_interrupted

RING_TYPES = pytest.mark.parametrize("ring_type", [TransitionRing, CompactRing])
ENOUGH = 40
"""Instructions that every operation here has at least: fewer places would mean that tracing does not work."""


def rest_of(consumer: Consumer) -> Iterator[int]:
    """Take the slots one by one, each checked to be the one that the cursor names by its step; yields the steps."""
    while (span := consumer.peek(1)) is not None:
        step = int(span.steps[0])
        check_planted(span, step)
        consumer.release(1)
        yield step


def fresh_ends(ring_type: type[TransitionRing]) -> Iterator[tuple[int, Any, Consumer]]:
    """Both ends of a fresh ring for every place of an interruption, counted from 0.

    It has gone two slots, so that the third of three is next and the memory's end is near.
    """
    for number in itertools.count():
        with ring_type.create(PLANTED_SCHEMA, capacity=3) as ring:
            producer, consumer = ring.producer(), ring.consumer()
            for index in range(2):
                assert push(producer, planted(index), index)
            assert list(rest_of(consumer)) == [0, 1]
            yield number, producer, consumer


def push(producer: Any, values: Any, index: int) -> bool:
    return bool(producer.push(values, version=index // 7, step=index, timeout_s=0))


@RING_TYPES
@pytest.mark.parametrize("way", ["push", "source", "commit"])
def test_a_slot_is_committed_or_not(ring_type: type[TransitionRing], way: str) -> None:
    for number, producer, consumer in fresh_ends(ring_type):
        values = producer.source(planted(2)) if way == "source" else planted(2)
        if way == "commit":
            plant(producer.try_reserve(), 2)
            interrupted = is_interrupted(lambda: producer.commit(version=0, step=2), number)  # noqa: B023
        else:
            interrupted = is_interrupted(lambda: push(producer, values, 2), number)  # noqa: B023
        committed = producer.committed
        assert push(producer, planted(3), 3)
        assert push(producer, planted(4), 4)
        assert list(rest_of(consumer)) == [2, 3, 4][3 - committed :]
        if not interrupted:
            assert committed == 3
            assert number > ENOUGH
            return


@RING_TYPES
def test_a_commit_that_was_interrupted_can_be_made_again_and_not_twice(ring_type: type[TransitionRing]) -> None:
    for number, producer, consumer in fresh_ends(ring_type):
        plant(producer.try_reserve(), 2)
        interrupted = is_interrupted(lambda: producer.commit(version=0, step=2), number)  # noqa: B023
        if producer.committed == 3:
            with pytest.raises(RuntimeError, match="without a slot"):
                producer.commit(version=0, step=2)
        else:
            producer.commit(version=0, step=2)
        assert list(rest_of(consumer)) == [2]
        if not interrupted:
            assert number > ENOUGH
            return


@RING_TYPES
@pytest.mark.parametrize("way", ["peek", "release", "wait"])
def test_a_slot_is_released_or_not(ring_type: type[TransitionRing], way: str) -> None:
    for number, producer, consumer in fresh_ends(ring_type):
        for index in (2, 3, 4):
            assert push(producer, planted(index), index)
        actions: dict[str, Callable[[], object]] = {
            "peek": lambda: consumer.peek(2),  # noqa: B023
            "release": lambda: consumer.release(1),  # noqa: B023
            "wait": lambda: consumer.wait(0),  # noqa: B023
        }
        if way == "release":
            consumer.peek(1)
        interrupted = is_interrupted(actions[way], number)
        released = consumer.released
        assert list(rest_of(consumer)) == [2, 3, 4][released - 2 :]
        assert push(producer, planted(5), 5)
        assert list(rest_of(consumer)) == [5]
        if not interrupted:
            assert released == (3 if way == "release" else 2)
            return


@pytest.mark.parametrize("way", ["publish", "poll"])
def test_weights_are_loaded_or_not(way: str) -> None:
    spec = WeightSpec([TensorSpec("w", "int64", (300,)), TensorSpec("b", "float32", (7,))])

    def weights(version: int) -> dict[str, Any]:
        return {"w": np.full(300, version), "b": np.full(7, version, np.float32)}

    def held(arrays: Any) -> set[int]:
        return {int(value) for array in arrays.values() for value in array}

    for number in itertools.count():
        with WeightSnapshot.create(spec) as snapshot, snapshot.publisher() as publisher, snapshot.reader() as reader:
            publisher.publish(weights(1), 1)
            assert reader.poll() == 1
            before = reader.weights
            if way == "publish":
                interrupted = is_interrupted(lambda: publisher.publish(weights(2), 2), number)
                reader.poll()
            else:
                publisher.publish(weights(2), 2)
                interrupted = is_interrupted(reader.poll, number)
            published = publisher.version
            assert held(before) == {1}
            assert held(reader.weights) == {reader.version}
            assert reader.version in (1, published)
            publisher.publish(weights(3), 3)
            assert reader.poll() == 3
            assert held(reader.weights) == {3}
        if not interrupted:
            assert number > ENOUGH
            return
