"""A ring against a list: any sequence of calls on both sides, producers that vanish in any state included."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from numa_collectors.rings import TransitionRing
from numa_collectors.rings.endpoint import C_LIVE
from numa_collectors.rings.layout import W_CONSUMER_CLAIM, W_PRODUCER_CLAIM
from numa_collectors.testing.ring import PLANTED_SCHEMA, check_planted, plant, planted


class RingMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 4), lead=st.none() | st.integers(1, 5))
    def make(self, capacity: int, lead: int | None) -> None:
        self.ring = TransitionRing.create(PLANTED_SCHEMA, capacity=capacity, max_lead_slots=lead)
        self.limit = min(capacity, lead or capacity)
        self.capacity = capacity
        self.generation = 0
        self.producer = self.ring.producer()
        self.consumer = self.ring.consumer()
        self.generations: list[int] = []  # of every committed slot
        self.released = 0
        self.peeked = 0
        self.reserved = False

    @property
    def in_use(self) -> int:
        return len(self.generations) - self.released

    @rule()
    def push(self) -> None:
        index = len(self.generations)
        done = self.producer.push(planted(index), version=index // 7, step=index, timeout_s=0)
        assert done == (self.in_use < self.limit)
        if done:
            self.generations.append(self.generation)
            self.reserved = False

    @rule()
    def fill(self) -> None:
        while self.in_use < self.limit:
            self.push()

    @rule(write=st.booleans())
    def reserve(self, write: bool) -> None:
        slot = self.producer.try_reserve()
        assert (slot is not None) == (self.in_use < self.limit)
        if slot is not None:
            self.reserved = True
            plant(slot, 12345 if write else len(self.generations))

    @precondition(lambda self: self.reserved)
    @rule()
    def commit(self) -> None:
        index = len(self.generations)
        slot = self.producer.try_reserve()
        plant(slot, index)
        self.producer.commit(version=index // 7, step=index)
        self.generations.append(self.generation)
        self.reserved = False

    @rule(max_slots=st.none() | st.integers(1, 5))
    def peek(self, max_slots: int | None) -> None:
        span = self.consumer.peek(max_slots)
        run = min(self.in_use, self.capacity - self.released % self.capacity)
        if max_slots is not None:
            run = min(run, max_slots)
        assert (0 if span is None else span.num_slots) == run
        if span is not None:
            check_planted(span, self.released)
            assert span.generations.tolist() == self.generations[self.released : self.released + run]
            self.peeked = max(self.peeked, self.released + run)

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        num_slots = data.draw(st.integers(0, max(0, self.peeked - self.released)))
        self.consumer.release(num_slots)
        self.released += num_slots

    @rule(how=st.sampled_from(("closed", "vanished", "lost")))
    def replace_producer(self, how: str) -> None:
        if how == "closed":
            self.producer.close()
        else:
            self.ring._memory.words[W_PRODUCER_CLAIM + C_LIVE] = 0  # as if its process had died
        if how == "lost":
            self.ring.set_producer_lost()
        assert self.consumer.closed == (how != "vanished" and not self.in_use)
        self.generation += 1
        self.producer = self.ring.producer(self.generation)
        self.reserved = False

    @rule()
    def replace_consumer(self) -> None:
        self.ring._memory.words[W_CONSUMER_CLAIM + C_LIVE] = 0
        self.consumer = self.ring.consumer()
        self.peeked = self.released

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.committed == self.producer.committed == len(self.generations)
            assert self.ring.released == self.consumer.released == self.released
            assert self.ring.fill == self.consumer.fill == self.in_use <= self.limit
            assert not self.consumer.closed

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()


TestRingMachine = RingMachine.TestCase
TestRingMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
