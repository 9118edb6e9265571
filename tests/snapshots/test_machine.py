"""A snapshot against a variable: any sequence of publishes, polls, deaths and refused calls."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from numa_collectors._identity import C_LIVE
from numa_collectors.snapshots import SnapshotReader, WeightSnapshot
from numa_collectors.snapshots.memory import W_CLAIM
from numa_collectors.testing.snapshot import MIXED_SPEC, check_weights, planted_weights


class Died(Exception):
    """The publisher's process ends here."""


class SnapshotMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.snapshot = WeightSnapshot.create(MIXED_SPEC)
        self.publisher = self.snapshot.publisher()
        self.readers: list[SnapshotReader] = [self.snapshot.reader()]
        self.latest = -1

    @rule(skip=st.integers(1, 3))
    def publish(self, skip: int) -> None:
        self.latest += skip
        self.publisher.publish(planted_weights(self.latest), self.latest)

    @rule(skip=st.integers(1, 3), written=st.booleans())
    def die_while_publishing(self, skip: int, written: bool) -> None:
        def copy(slot: int) -> None:
            if written:
                for array in self.publisher._views[slot].values():
                    array[...] = 1
            raise Died

        with contextlib.suppress(Died):
            self.publisher._write(copy, self.latest + skip)
        self.snapshot._memory.words[W_CLAIM + C_LIVE] = 0
        self.publisher = self.snapshot.publisher()

    @rule()
    def add_reader(self) -> None:
        self.readers.append(self.snapshot.reader())

    @rule(which=st.integers(0, 10))
    def poll(self, which: int) -> None:
        reader = self.readers[which % len(self.readers)]
        new = reader.version < self.latest
        assert reader.poll() == (self.latest if new else None)

    @invariant()
    def everything_held_is_whole(self) -> None:
        if hasattr(self, "snapshot"):
            assert self.publisher.version == self.snapshot.latest == self.latest
            for reader in self.readers:
                assert reader.latest == self.latest
                assert reader.version <= self.latest
                assert reader.num_retries == 0
                if reader.version >= 0:
                    check_weights(reader.weights, reader.version)

    def teardown(self) -> None:
        if hasattr(self, "snapshot"):
            self.snapshot.close()


TestSnapshotMachine = SnapshotMachine.TestCase
TestSnapshotMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
