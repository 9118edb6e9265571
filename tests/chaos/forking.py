"""One worker after the other opens an end of a ring or a snapshot and dies at a forced point, tens of them a second.

The worker is forked from a process without threads that touch any end, opens its end anew and never returns.
"""

from __future__ import annotations

import os
import random
import signal
import traceback
from collections.abc import Callable
from typing import Any

from numa_collectors.rings import TransitionRing
from numa_collectors.rings import layout as ring_layout
from numa_collectors.snapshots import WeightSnapshot
from numa_collectors.snapshots import memory as snapshot_layout
from numa_collectors.worker import PinnedWorker
from tests.chaos.payload import HalfCopy, Ledger, check_weights, die, fill, weights_of

__all__ = ["Forking"]

_RING_WORDS = {getattr(ring_layout, name): name for name in dir(ring_layout) if name.startswith("W_")}
_SNAPSHOT_WORDS = {getattr(snapshot_layout, name): name for name in dir(snapshot_layout) if name.startswith("W_")}
_SNAPSHOT_WORDS |= {
    snapshot_layout.counter_word(slot): f"counter of slot {slot}" for slot in range(snapshot_layout.NUM_SLOTS)
}
_MAX_SLOTS = 6


class _Tripwire:
    """Stands in for the words of a ring or a snapshot: ends the process before or after its ``countdown``-th store."""

    def __init__(self, words: memoryview, names: dict[int, str], countdown: int, tell: Callable[[str], None]) -> None:
        self._words = words
        self._names = names
        self._countdown = countdown
        self._tell = tell

    def __getitem__(self, index: Any) -> Any:
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._countdown -= 1
        last = self._countdown == 0
        near = max((word for word in self._names if word <= index), default=0)
        if last and random.random() < 0.5:
            self._tell(f"before a store to {self._names[near]}")
            die()
        self._words[index] = value
        if last:
            self._tell(f"after a store to {self._names[near]}")
            die()

    def release(self) -> None:
        self._words.release()


class Forking(PinnedWorker):
    """Forks ``num_kills`` workers of drawn kinds, one after the other; its result counts the points of their ends.

    ``ahead``: its producers are forked workers, its consumer is the test.  ``back``: the other way round, with this
    process as the producer.  ``down``: weights, read by the test; ``up``: weights that this process publishes.
    """

    def __init__(
        self,
        seed: int,
        num_kills: int,
        rings: tuple[TransitionRing, TransitionRing],
        snapshots: tuple[WeightSnapshot, WeightSnapshot],
    ) -> None:
        super().__init__(role="forking")
        self.seed = seed
        self.num_kills = num_kills
        self.ahead, self.back = rings
        self.down, self.up = snapshots

    def setup(self) -> None:
        self.points: dict[str, int] = {}
        self.rng = random.Random(self.seed)
        self.number = 0
        self.returned = 0
        self.producer = self.back.producer()
        self.publisher = self.up.publisher()
        self.publisher.publish(weights_of(1), 1)

    def step(self) -> bool:
        kind = self.rng.choice([self._produce, self._produce, self._consume, self._publish, self._load])
        while (slot := self.producer.try_reserve()) is not None:
            fill(slot, 0, 0, self.producer.committed, self.producer.committed)
            self.producer.commit(step=self.producer.committed)
        self.publisher.publish(weights_of(self.publisher.version + 1), self.publisher.version + 1)
        self.number += 1
        self._fork(kind)
        self._check_released()
        if self.number < self.num_kills:
            return False
        self.number += 1
        self._fork(self._produce, ends_well=True)
        self.set_result(self.points)
        return True

    def teardown(self) -> None:
        self.producer.close()
        self.publisher.close()

    def _check_released(self) -> None:
        released = self.back.released
        assert self.returned <= released <= self.back.committed, (self.returned, released, self.back.committed)
        self.returned = released

    def _fork(
        self, kind: Callable[[random.Random, Callable[[str], None], bool], None], ends_well: bool = False
    ) -> None:
        """Fork a worker, and count where it ended; a worker that ends otherwise than planned is an error."""
        reading, writing = os.pipe()
        seed = self.rng.random()
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                random.seed(seed)
                kind(random.Random(seed), lambda text: _tell(writing, text), ends_well)
                code = 0
            except BaseException:  # noqa: BLE001 - a fork must never run the code of what it was forked from
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(reading, encoding="utf-8") as told:
            lines = told.read().splitlines()
        assert code == (0 if ends_well else -signal.SIGKILL), f"a worker ended with {code} after {lines}"
        if not ends_well:
            self.points[lines[-1]] = self.points.get(lines[-1], 0) + 1

    # what a forked worker does

    def _produce(self, rng: random.Random, tell: Callable[[str], None], ends_well: bool) -> None:
        point = rng.choice(["store", "store", "slot reserved", "slot half-written", "slot written, not committed"])
        steps = rng.randrange(1, _MAX_SLOTS)
        if point == "store" and not ends_well:
            self.ahead._memory.words = _Tripwire(  # type: ignore[assignment]
                self.ahead._memory.words, _RING_WORDS, rng.randrange(1, 6 + steps), tell
            )
        producer = self.ahead.producer(generation=self.number)
        tell("producer: opened")
        for step in range(1_000_000):
            slot = producer.reserve(timeout_s=60.0)
            assert slot is not None
            if step == steps and not ends_well:
                tell(f"producer: {point}")
                if point == "slot reserved":
                    die()
                half = point == "slot half-written"
                fill(slot, 0, self.number, step, producer.committed, half=half)
                if half or point == "slot written, not committed":
                    die()
            fill(slot, 0, self.number, step, producer.committed)
            producer.commit(version=self.number, step=producer.committed)
            if step == steps and ends_well:
                producer.close()
                return

    def _consume(self, rng: random.Random, tell: Callable[[str], None], ends_well: bool) -> None:
        words = self.back._memory.words
        self.back._memory.words = _Tripwire(words, _RING_WORDS, rng.randrange(1, 10), tell)  # type: ignore[assignment]
        begun = self.back.released
        consumer = self.back.consumer()
        ledger = Ledger(1, begun=False)
        while (span := consumer.peek(rng.choice([1, 2, None]))) is not None:
            first, _ = ledger.take(0, span, span)
            assert first == begun, f"slot {first} came first, {begun} were released"
            begun += span.num_slots
            consumer.release(span.num_slots)
        tell("consumer: all released")
        die()

    def _publish(self, rng: random.Random, tell: Callable[[str], None], ends_well: bool) -> None:
        within_a_copy = rng.random() < 0.5
        if not within_a_copy:
            words = self.down._memory.words
            countdown = rng.randrange(1, 13)
            self.down._memory.words = _Tripwire(words, _SNAPSHOT_WORDS, countdown, tell)  # type: ignore[assignment]
        publisher = self.down.publisher()
        for count in range(4):
            version = publisher.version + 1
            if within_a_copy and count == 3:
                tell("publisher: within a copy of weights")
                publisher._views = [{**views, "last": HalfCopy(views["last"])} for views in publisher._views]  # type: ignore[dict-item]
            publisher.publish(weights_of(version), version)
        tell("publisher: all published")
        die()

    def _load(self, rng: random.Random, tell: Callable[[str], None], ends_well: bool) -> None:
        reader = self.up.reader()
        assert reader.poll() is not None, "this process does not publish meanwhile"
        check_weights(reader.weights, reader.version, 0)
        _, loaded, (flat, views) = reader._state
        reader._state = (-1, loaded, (HalfCopy(flat), views))  # type: ignore[assignment]
        tell("reader: within a load of weights")
        reader.poll()


def _tell(descriptor: int, text: str) -> None:
    os.write(descriptor, f"{text}\n".encode())
