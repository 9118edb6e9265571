"""Ends of rings and snapshots die before and after every store, within copies; the other end goes on."""

from __future__ import annotations

import random
import sys

import pytest

from numa_collectors.rings import Consumer, TransitionRing
from numa_collectors.snapshots import SnapshotReader, WeightSnapshot
from numa_collectors.worker import WorkerGroup
from tests.chaos.arms import TIMEOUT_S, Tally, nothing_left, num_kills
from tests.chaos.forking import Forking
from tests.chaos.payload import SCHEMA, WEIGHTS, Ledger, check_weights

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks workers"),
    pytest.mark.timeout(TIMEOUT_S),
]


def _watch(group: WorkerGroup, consumer: Consumer, reader: SnapshotReader, rng: random.Random) -> int:
    """Consume and read until the last producer has closed its end; return the slots that came."""
    ledger = Ledger(1)
    version = -1
    while not consumer.closed:
        assert group.poll() == []
        if reader.poll() is not None:
            check_weights(reader.weights, reader.version, version)
            version = reader.version
        if consumer.has_slots_or_ended() or consumer.wait(0.1):
            span = consumer.peek(rng.choice([None, 1, 2]))
            if span is not None:
                ledger.take(0, span, span)
                consumer.release(span.num_slots)
    return ledger.counts[0]


def _run(seed: int, kills: int) -> dict[str, int]:
    rng = random.Random(seed)
    with (
        TransitionRing.create(SCHEMA, capacity=rng.choice([1, 2, 5, 64]), name="ahead") as ahead,
        TransitionRing.create(SCHEMA, capacity=rng.choice([1, 3, 64]), name="back") as back,
        WeightSnapshot.create(WEIGHTS, name="down") as down,
        WeightSnapshot.create(WEIGHTS, name="up") as up,
        WorkerGroup([Forking(seed, kills, (ahead, back), (down, up))]) as group,
    ):
        group.start()
        consumer, reader = ahead.consumer(), down.reader()
        assert _watch(group, consumer, reader, rng) == ahead.committed
        assert group.workers[0].join(60.0)
        assert group.poll() == []
        points: dict[str, int] = group.workers[0].result
        consumer.close()
    return points


def test_the_other_end_goes_on_over_a_death_at_any_point() -> None:
    tally, wanted = Tally("protocols"), num_kills(short=80, share=1.0)
    while tally.num_kills < wanted:
        with tally.run() as seed, nothing_left():
            tally.points.update(_run(seed, min(100, wanted - tally.num_kills)))
    tally.show()
