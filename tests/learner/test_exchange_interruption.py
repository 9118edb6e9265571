"""Ctrl-C in a learner's drain or publish: what was delivered or published before and after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise

import numpy as np

from numa_collectors.exchange import Exchange
from numa_collectors.rings import TransitionRing
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec
from numa_collectors.testing.ring import PLANTED_SCHEMA, check_planted, planted
from tests.interruption import is_interrupted

WEIGHTS = WeightSpec([TensorSpec("w", "float32", (20,))])
STEPS = [0, 1, 2]


def exchanges() -> Iterator[tuple[Exchange, list[WeightSnapshot], int]]:
    """A fresh exchange of two rings, each with ``STEPS`` in it, for every place of an interruption, counted from 0."""
    for number in itertools.count():
        with ExitStack() as stack:
            rings = [stack.enter_context(TransitionRing.create(PLANTED_SCHEMA, capacity=4)) for _ in range(2)]
            snapshots = [stack.enter_context(WeightSnapshot.create(WEIGHTS)) for _ in range(2)]
            for ring in rings:
                with ring.producer() as producer:
                    for step in STEPS:
                        assert producer.push(planted(step), version=step // 7, step=step, timeout_s=0)
            exchange = Exchange(rings, snapshots)
            stack.callback(exchange.close)
            yield exchange, snapshots, number


def test_every_slot_is_delivered_whatever_is_interrupted() -> None:
    for exchange, _, number in exchanges():
        seen: dict[int, list[int]] = {0: [], 1: []}

        def drain(exchange: Exchange = exchange, seen: dict[int, list[int]] = seen) -> None:
            for rank, span in exchange.drain(2):
                check_planted(span, int(span.steps[0]))
                seen[rank] += span.steps.tolist()

        interrupted = is_interrupted(drain, number)
        before = [len(steps) for steps in seen.values()]
        drain()
        drain()
        again = 0
        for (_, steps), so_far in zip(sorted(seen.items()), before, strict=True):
            # The one span that was in the loop's hand may come again, from its first slot on; there is no other jump.
            jumps = [index for index, (old, new) in enumerate(pairwise(steps), 1) if new != old + 1]
            assert jumps in ([], [so_far])
            again += len(jumps)
            assert sorted(set(steps)) == STEPS
        assert again <= 1
        assert exchange.finished
        if not interrupted:
            assert again == 0
            return


def test_a_publish_after_one_that_was_interrupted_reaches_everybody() -> None:
    for exchange, snapshots, number in exchanges():
        first = np.full(20, 1, np.float32)
        interrupted = is_interrupted(lambda: exchange.publish({"w": first}), number)  # noqa: B023
        version = exchange.publish({"w": np.full(20, 2, np.float32)})
        for snapshot in snapshots:
            with snapshot.reader() as reader:
                assert reader.poll() == version == exchange.version
                assert (reader.weights["w"] == 2).all()
        if not interrupted:
            assert version == 2
            return
