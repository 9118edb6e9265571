"""A compact ring gives back what was written, as a plain ring does; its side area never overflows and never blocks idly."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from numa_collectors.errors import ConfigError, PeerLostError, SchemaMismatchError
from numa_collectors.rings import CompactRing, Field, Schema, TransitionRing
from numa_collectors.rings import endpoint as endpoint_module
from numa_collectors.rings.endpoint import C_LIVE
from numa_collectors.rings.layout import HEADER_BYTES, W_CONSUMER_CLAIM, W_PRODUCER_ASLEEP, W_PRODUCER_CLAIM
from numa_collectors.testing.ring import RingConformance

PER_ENV = Schema(
    [
        Field("obs", "float32", (3,)),
        Field("action", "float64", ()),
        Field("cam", "uint8", (2, 5)),
        Field("next_obs", "float32", (3,)),
        Field("terminated", "bool", ()),
        Field("next_cam", "uint8", (2, 5)),
    ]
)


SEEDS = st.integers(0, 10**6)
BEGINS = st.sampled_from(("none", "some", "all"))


class TestCompactRing(RingConformance):
    num_slots = 3_000
    num_handovers = 100
    test_producers_killed_at_random = None  # four more processes for what the test of every stage shows

    def make_ring(self, schema: Schema, capacity: int) -> CompactRing:
        return CompactRing.create(schema, capacity=capacity)


def any_slot(schema: Schema, rng: np.random.Generator) -> dict[str, Any]:
    """Random bytes in every field: NaN, infinities and negative zeros included."""
    slot = {}
    for field in schema.fields:
        raw = rng.integers(0, 2 if field.dtype == "bool" else 256, field.nbytes, np.uint8)
        slot[field.name] = raw.view(field.dtype).reshape(field.shape)
    return slot


class LayoutMachine(RuleBasedStateMachine):
    """The same slots through both layouts, with any pattern of episodes, chunks, wraps, vanished and replaced ends."""

    @initialize(capacity=st.integers(1, 5), num_envs=st.integers(1, 4), lead=st.none() | st.integers(1, 6))
    def make(self, capacity: int, num_envs: int, lead: int | None) -> None:
        self.schema = PER_ENV.with_leading(num_envs)
        self.num_envs, self.limit = num_envs, min(capacity, lead or capacity)
        self.plain = TransitionRing.create(self.schema, capacity=capacity, max_lead_slots=lead)
        self.compact = CompactRing.create(self.schema, capacity=capacity, max_lead_slots=lead)
        self.rings = (self.plain, self.compact)
        self.producers: list[Any] = [ring.producer() for ring in self.rings]
        self.consumers: list[Any] = [ring.consumer() for ring in self.rings]
        self.generation = 0
        self.last: dict[str, Any] | None = None
        self.begun: list[int] = []  # rows of each committed slot that do not go on from the slot before
        self.released = 0

    def room(self) -> bool:
        rows = self.compact._layout.num_side_rows(self.compact.capacity) - self.num_envs
        return len(self.begun) - self.released < self.limit and sum(self.begun[self.released :]) <= rows

    def next_slot(self, seed: int, begins: str) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        slot = any_slot(self.schema, rng)
        for name in ("obs", "cam"):
            going_on = {"none": np.ones, "some": lambda n: rng.random(n) < 0.6, "all": np.zeros}[begins](
                self.num_envs
            ) > 0
            if self.last is not None:
                slot[name][going_on] = self.last["next_" + name][going_on]
        return slot

    def note(self, slot: dict[str, Any]) -> None:
        last = self.last
        rows = range(self.num_envs)
        if last is not None:
            rows = [
                row
                for row in rows
                if any(slot[name][row].tobytes() != last["next_" + name][row].tobytes() for name in ("obs", "cam"))
            ]
        self.begun.append(len(rows))
        self.last = slot

    @rule(seed=SEEDS, begins=BEGINS, in_place=st.booleans())
    def write(self, seed: int, begins: str, in_place: bool) -> None:
        step = len(self.begun)
        assert (self.producers[1].try_reserve() is not None) == self.room()
        if not self.room():
            assert not self.producers[1].push(any_slot(self.schema, np.random.default_rng(seed)), timeout_s=0)
            return
        slot = self.next_slot(seed, begins)
        for producer in self.producers:
            if in_place:
                views = producer.try_reserve()
                assert list(views) == list(self.schema.names)
                for name, value in slot.items():
                    views[name][...] = value
                producer.commit(version=step + 1, step=step)
            else:
                assert producer.push(slot, version=step + 1, step=step, timeout_s=0)
        self.note(slot)

    @rule(num_slots=st.integers(2, 6), seed=SEEDS, begins=BEGINS)
    def write_many(self, num_slots: int, seed: int, begins: str) -> None:
        for index in range(num_slots):
            self.write(seed + index, begins if index % 2 else "none", True)

    @rule(most=st.none() | st.integers(1, 6), part=st.sampled_from((0.0, 0.5, 1.0, 1.0)))
    def read(self, most: int | None, part: float) -> None:
        """Read in chunks that differ between the two, and release what both have seen of it."""
        spans = [consumer.peek(max_slots) for consumer, max_slots in zip(self.consumers, (None, most), strict=True)]
        if self.released == len(self.begun):
            assert spans == [None, None]
            return
        common = min(span.num_slots for span in spans)
        for values in zip(*([span[name] for name in self.schema.names] for span in spans), strict=True):
            plain, compact = (value[:common] for value in values)
            assert (compact.dtype, compact.shape, compact.tobytes()) == (plain.dtype, plain.shape, plain.tobytes())
            assert not values[1].flags.writeable
        assert list(spans[1]) == list(self.schema.names)
        for name, value in spans[1].writable.items():
            assert np.shares_memory(value, spans[1][name])
        steps, serials = spans[1].steps.tolist(), range(self.released, self.released + spans[1].num_slots)
        assert steps == list(serials)
        assert spans[0].generations[:common].tolist() == spans[1].generations[:common].tolist()
        num_slots = round(common * part)
        for consumer in self.consumers:
            consumer.release(num_slots)
        self.released += num_slots

    @rule(half_written=st.booleans(), closed=st.booleans(), seed=SEEDS)
    def replace_producers(self, half_written: bool, closed: bool, seed: int) -> None:
        self.generation += 1
        for ring, producer in zip(self.rings, self.producers, strict=True):
            slot = producer.try_reserve() if half_written else None
            if slot is not None:
                for name, value in any_slot(self.schema, np.random.default_rng(seed)).items():
                    slot[name][...] = value
                if ring is self.compact:
                    producer._writer.store(producer.committed)  # the last thing before the commit
            if closed:
                producer.close()
            else:
                ring._memory.words[W_PRODUCER_CLAIM + C_LIVE] = 0  # as if its process had died
        self.producers = [ring.producer(self.generation) for ring in self.rings]

    @rule()
    def replace_consumers(self) -> None:
        for ring in self.rings:
            ring._memory.words[W_CONSUMER_CLAIM + C_LIVE] = 0
        self.consumers = [ring.consumer() for ring in self.rings]

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "rings"):
            assert self.plain.committed == self.compact.committed == len(self.begun)
            assert self.plain.released == self.compact.released == self.released

    def teardown(self) -> None:
        if hasattr(self, "rings"):
            for ring in self.rings:
                ring.close()


TestLayoutMachine = LayoutMachine.TestCase
TestLayoutMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


NUM_ENVS = 3
BATCHED = PER_ENV.with_leading(NUM_ENVS)


def push_begun(producer: Any, rng: np.random.Generator) -> bool:
    """Push a slot in which no row goes on from the slot before."""
    return bool(producer.push(any_slot(BATCHED, rng), timeout_s=0))


def test_a_full_side_area_makes_the_producer_wait_and_a_release_wakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sleep until woken: the look after a quarter of a second would hide a lost wake-up.
    monkeypatch.setattr(endpoint_module, "MAX_SLEEP_S", 120.0)
    rng = np.random.default_rng(0)
    with CompactRing.create(BATCHED, capacity=10) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        pushed = 0
        while push_begun(producer, rng):
            pushed += 1
        # Two slots' rows beside the one that is kept free, fewer than the ten slots of the ring.
        assert pushed == ring.fill == 3
        assert producer.reserve(0.001) is None
        with pytest.raises(RuntimeError, match="without a slot"):
            producer.commit()
        assert ring.committed == 3

        def release() -> None:
            consumer.peek()
            consumer.release(1)

        def when_asleep(act: Callable[[], None]) -> None:
            while not ring._memory.words[W_PRODUCER_ASLEEP]:
                pass
            act()

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(when_asleep, release)
            assert producer.reserve(60.0) is not None
            done.result()
            producer.commit()
            assert producer.try_reserve() is None
            done = pool.submit(when_asleep, ring.set_consumer_lost)
            with pytest.raises(PeerLostError):
                producer.reserve(20.0)
            done.result()


def test_no_episode_begins_and_no_observation_is_copied() -> None:
    rng = np.random.default_rng(1)
    with CompactRing.create(BATCHED, capacity=4) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        last = any_slot(BATCHED, rng)
        for lap in range(13):
            slot = any_slot(BATCHED, rng)
            if lap:
                slot |= {"obs": last["next_obs"], "cam": last["next_cam"]}
            assert producer.push(slot, timeout_s=0)
            span = consumer.peek()
            memory = np.frombuffer(ring.region.buf, np.uint8)
            assert np.shares_memory(span["obs"], memory) == (lap > 0)
            del memory
            assert span["obs"].tobytes() == slot["obs"].tobytes()
            consumer.release(1)
            last = slot
        consumer.close()
        assert not span, "a span that is left lying about keeps the ring mapped"


def test_values_that_are_equal_and_not_the_same_bytes_are_kept_apart() -> None:
    schema = Schema([Field("obs", "float32", (2, 1)), Field("next_obs", "float32", (2, 1))])
    with CompactRing.create(schema, capacity=4) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        signed_zeros = np.array([[0.0], [-0.0]], np.float32)
        for _ in range(2):
            producer.push({"obs": signed_zeros, "next_obs": -signed_zeros})
            assert consumer.peek()["obs"].tobytes() == signed_zeros.tobytes()
            consumer.release(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([Field("obs", "float32", (2, 3))], "needs a field x beside next_x"),
        ([Field("obs", "float32", (2, 3)), Field("next_obs", "float64", (2, 3))], "of one dtype and shape"),
        ([Field("obs", "float32", (2, 3)), Field("next_obs", "float32", (2, 4))], "of one dtype and shape"),
        ([Field("obs", "float32"), Field("next_obs", "float32")], "with_leading"),
        (
            [
                Field("a", "bool", (2,)),
                Field("next_a", "bool", (2,)),
                Field("b", "bool", (3,)),
                Field("next_b", "bool", (3,)),
            ],
            "with_leading",
        ),
    ],
)
def test_schemas_that_have_nothing_to_share_are_refused(fields: list[Field], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompactRing.create(Schema(fields), capacity=2)


def test_sides_of_different_layouts_are_told_apart() -> None:
    with CompactRing.create(BATCHED, capacity=2) as ring, pytest.raises(SchemaMismatchError):
        TransitionRing(ring.region, BATCHED, "ring")
    with TransitionRing.create(BATCHED, capacity=2) as ring, pytest.raises(SchemaMismatchError):
        CompactRing(ring.region, BATCHED, "ring")


@pytest.mark.parametrize(("num_envs", "shape", "dtype"), [(64, (17,), "float32"), (1, (84, 84, 4), "uint8")])
def test_saving_and_choice_of_the_capacity_by_bytes(num_envs: int, shape: tuple[int, ...], dtype: str) -> None:
    fields = [Field("obs", dtype, shape), Field("reward", "float32"), Field("next_obs", dtype, shape)]
    schema = Schema(fields).with_leading(num_envs)
    plain, compact = (ring.plan(schema, capacity=64).num_bytes for ring in (TransitionRing, CompactRing))
    assert compact < 0.6 * plain
    for max_bytes in (plain // 2, plain, None):
        plan = CompactRing.plan(schema, max_bytes=max_bytes)
        limit = HEADER_BYTES + (max_bytes or 16 << 20)
        assert (
            plan.num_bytes <= limit < CompactRing.plan(schema, capacity=plan.capacity + 1).num_bytes
            or plan.capacity == 256
        )
        with CompactRing.create(schema, max_bytes=max_bytes) as ring:
            assert (ring.capacity, ring.max_lead_slots) == (plan.capacity, plan.capacity)
    with pytest.raises(ValueError, match="raise max_bytes"):
        CompactRing.plan(schema, max_bytes=2 * CompactRing.plan(schema).stored.slot_bytes)
