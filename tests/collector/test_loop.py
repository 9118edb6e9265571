"""The loop between a real ring and a real snapshot, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from numa_collectors.collector import (
    Collector,
    CollectorContext,
    CollectorError,
    CollectorLoop,
    CollectorOptions,
    GymCollector,
    NonFiniteError,
    build_loop,
    gym_schema,
)
from numa_collectors.errors import ConfigError, PeerLostError
from numa_collectors.rings import Consumer, Field, Schema, TransitionRing
from numa_collectors.snapshots import SnapshotPublisher, TensorSpec, WeightSnapshot, WeightSpec
from tests.collector.envs import Constant, Counter, Nested, Numbered, chain_next

NUM_ENVS = 2
PLAIN = Schema([Field("obs", "float32", (3,)), Field("reward", "float32", ()), Field("done", "bool", ())])


@dataclass
class Rig:
    """A ring and a snapshot with their far ends, and what was entered while waiting."""

    ring: TransitionRing
    snapshot: WeightSnapshot
    consumer: Consumer
    publisher: SnapshotPublisher
    num_waits: int = 0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self.num_waits += 1
        yield

    def loop(self, factory: Any = Numbered, *, quota: Any = None, generation: int = 0, **options: Any) -> CollectorLoop:
        ctx = CollectorContext(num_envs=NUM_ENVS, total_num_envs=NUM_ENVS, seed=7, run_seed=7).restarted(generation)
        return build_loop(
            factory, ctx, self.ring, self.snapshot, CollectorOptions(**options), quota_slots=quota, waiting=self.waiting
        )

    def publish(self, version: int) -> None:
        self.publisher.publish({"w": np.full(4, version, np.float32)}, version)


@contextlib.contextmanager
def make_rig(schema: Schema = PLAIN, capacity: int = 4) -> Iterator[Rig]:
    with (
        TransitionRing.create(schema.with_leading(NUM_ENVS), capacity=capacity) as ring,
        WeightSnapshot.create(WeightSpec([TensorSpec("w", "float32", (4,))])) as snapshot,
        ring.consumer() as consumer,
        snapshot.publisher() as publisher,
    ):
        yield Rig(ring, snapshot, consumer, publisher)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with make_rig() as made:
        yield made


def read(consumer: Consumer) -> dict[str, np.ndarray]:
    """Take everything that is committed."""
    span = consumer.peek()
    assert span is not None
    taken = {name: span[name].copy() for name in span}
    taken["versions"], taken["steps"] = span.versions.copy(), span.steps.copy()
    taken["generations"] = span.generations.copy()
    consumer.release(span.num_slots)
    return taken


def test_nothing_is_acted_on_before_the_first_weights(rig: Rig) -> None:
    loop = rig.loop()
    collector: Any = loop._collector
    assert not loop.run_once(0.01)
    assert not loop.run_once(0.0)
    assert (collector.calls, rig.num_waits, rig.ring.committed) == (0, 2, 0)
    assert loop.stats()["wait_weights_s"] >= 0.01
    rig.publish(1)
    assert loop.run_once(0.0)
    assert (collector.calls, collector.versions) == (1, [1])
    loop.close()


def test_slots_carry_version_step_and_generation(rig: Rig) -> None:
    loop = rig.loop(weight_poll_interval=2)
    for version in (1, 2, 3, 4):
        rig.publish(version)
        assert loop.run_once(0.0)
    got = read(rig.consumer)
    # Polled before slots 0 and 2.
    assert got["versions"].tolist() == [1, 1, 3, 3]
    assert got["steps"].tolist() == [0, 1, 2, 3]
    assert got["obs"][:, 0, 0].tolist() == [1, 2, 3, 4]
    assert loop.version == 3
    assert loop.stats()["weight_loads"] == 2


def test_full_ring_stops_the_environment_and_waits(rig: Rig) -> None:
    loop = rig.loop()
    rig.publish(1)
    assert [loop.run_once(0.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert rig.num_waits == 0
    assert not loop.run_once(0.01)
    assert rig.num_waits == 1
    stats = loop.stats()
    assert stats["slots"] == 4
    assert stats["wait_space_ns"] >= 10_000_000
    assert loop._collector.calls == 4  # type: ignore[attr-defined]
    read(rig.consumer)
    assert loop.run_once(0.01)
    assert read(rig.consumer)["obs"][0, 0, 0] == 5


def test_quota_ends_the_loop_and_tells_the_consumer(rig: Rig) -> None:
    loop = rig.loop(quota_slots=3)
    rig.publish(1)
    assert [loop.run_once(0.0) for _ in range(5)] == [True] * 3 + [False] * 2
    assert loop.finished
    assert read(rig.consumer)["steps"].tolist() == [0, 1, 2]
    assert rig.consumer.closed


def test_quota_may_change_while_it_is_not_reached(rig: Rig) -> None:
    quota = [2]
    loop = rig.loop(quota=lambda: quota[0])
    rig.publish(1)
    assert loop.run_once(0.0)
    quota[0] = 3
    assert [loop.run_once(0.0) for _ in range(4)] == [True, True, False, False]
    assert loop.finished


def test_next_generation_goes_on_where_the_last_one_died(rig: Rig) -> None:
    first = rig.loop(partial(Numbered, fault="raise"), quota_slots=4)
    rig.publish(1)
    assert first.run_once(0.0)
    assert first.run_once(0.0)
    with pytest.raises(
        CollectorError, match=r"collector\[0\], step 2: collect\(\) raised ValueError: broken on purpose"
    ):
        first.run_once(0.0)
    # As its process ends with it, nobody is told that this collector has finished.
    assert not rig.consumer.closed
    first._producer.close()
    second = rig.loop(generation=1, quota_slots=4)
    assert second.ctx.start_slot == 2
    assert second.ctx.seed != first.ctx.seed
    assert [second.run_once(0.0) for _ in range(4)] == [True, True, False, False]
    got = read(rig.consumer)
    assert got["steps"].tolist() == [0, 1, 2, 3]
    assert got["generations"].tolist() == [0, 0, 1, 1]
    assert second.stats()["slots"] == 2


def test_closed_ring_is_an_orderly_end_and_a_dead_consumer_is_not(rig: Rig) -> None:
    loop = rig.loop()
    rig.publish(1)
    rig.ring.set_consumer_lost()
    with pytest.raises(PeerLostError):
        loop.run_once(0.0)
    assert not loop.finished
    rig.consumer.close()
    with make_rig() as other:
        loop = other.loop()
        other.publish(1)
        assert loop.run_once(0.0)
        other.consumer.close()
        assert not loop.run_once(0.0)
        assert loop.finished


def test_nan_names_collector_environment_step_and_field(rig: Rig) -> None:
    loop = rig.loop(partial(Numbered, fault="nan"))
    rig.publish(1)
    assert loop.run_once(0.0)
    assert loop.run_once(0.0)
    where = (
        r"collector\[0\], environment 1 \(row 1 of its 2\), step 2, field 'obs': expected .*, got nan at index \[0\]"
    )
    with pytest.raises(NonFiniteError, match=where) as info:
        loop.run_once(0.0)
    assert (info.value.rank, info.value.env, info.value.step, info.value.field) == (0, 1, 2, "obs")
    assert rig.ring.committed == 2
    assert read(rig.consumer)["obs"].max() == 2


@pytest.mark.parametrize("fault", ["nan", "raise"])
def test_exception_that_is_kept_does_not_keep_the_ring(fault: str) -> None:
    caught: list[BaseException] = []
    with make_rig() as rig:
        loop = rig.loop(partial(Numbered, fault=fault))
        rig.publish(1)
        assert [loop.run_once(0.0) for _ in range(2)] == [True, True]
        try:
            loop.run_once(0.0)
        except CollectorError as error:
            caught.append(error)
    # Closing the ring raises BufferError while views of it exist.
    assert caught[0].__traceback__ is not None


def test_check_can_be_turned_off(rig: Rig) -> None:
    loop = rig.loop(partial(Numbered, fault="nan"), check_finite=False)
    rig.publish(1)
    assert [loop.run_once(0.0) for _ in range(3)] == [True] * 3
    assert np.isnan(read(rig.consumer)["obs"]).any()


def test_field_that_is_never_written_is_found(rig: Rig) -> None:
    loop = rig.loop(partial(Numbered, fault="forget"))
    rig.publish(1)
    with pytest.raises(NonFiniteError, match=r"field 'reward': .*it was never written"):
        loop.run_once(0.0)


@pytest.mark.parametrize(("fault", "name", "step"), [("nan_obs", "next_obs", 2), ("inf_reward", "reward", 2)])
def test_nonfinite_from_an_environment(fault: str, name: str, step: int) -> None:
    make_env = [Counter, partial(Counter, fault=fault)]
    with make_rig(gym_schema(Counter).schema, capacity=8) as rig:
        loop = rig.loop(partial(GymCollector, make_env=make_env, make_policy=Constant))
        rig.publish(1)
        assert [loop.run_once(0.0) for _ in range(step)] == [True] * step
        with pytest.raises(NonFiniteError, match=rf"environment 1 .*step {step}, field '{name}'"):
            loop.run_once(0.0)
        assert rig.ring.committed == step
        loop.close()


def test_wrong_factories_are_named(rig: Rig) -> None:
    with pytest.raises(ConfigError, match=r"collector\[0\]: expected the collector factory .*Collector, got dict"):
        rig.loop(lambda ctx: {})
    with pytest.raises(ConfigError, match="weight_poll_interval: expected at least 1"):
        rig.loop(weight_poll_interval=0)
    with pytest.raises(ConfigError, match="quota_slots: expected at least 0"):
        rig.loop(quota_slots=-1)
    # A failed start does not say that the collector has finished.
    assert not rig.consumer.closed
    assert rig.ring.committed == 0


def test_collector_without_weights_starts_at_once() -> None:
    with make_rig() as rig:
        loop = build_loop(Numbered, CollectorContext(num_envs=2, total_num_envs=2), rig.ring, None)
        assert loop.run_once(0.0)
        assert read(rig.consumer)["versions"].tolist() == [0]


def test_counters_of_a_real_collector() -> None:
    schema = gym_schema(chain_next).schema
    with make_rig(schema, capacity=64) as rig:
        loop = rig.loop(partial(GymCollector, make_env=chain_next, make_policy=Constant))
        rig.publish(1)
        for _ in range(40):
            assert loop.run_once(0.0)
        got, stats = read(rig.consumer), loop.stats()
        ends = (got["terminated"] | got["truncated"]) & got["valid"]
        assert stats["slots"] == 40
        assert stats["env_steps"] == 80
        assert stats["masked_env_steps"] == int((~got["valid"]).sum()) > 0
        assert stats["episodes"] == int(ends.sum()) > 0
        assert stats["return_sum"] <= float(got["reward"][got["valid"]].sum())
        assert stats["length_sum"] <= int(got["valid"].sum())
        assert stats["collect_ns"] > stats["env_step_ns"] > 0
        assert min(stats[name] for name in ("act_ns", "push_ns", "sync_ns", "check_s")) > 0
        assert (stats["weight_version"], stats["generation"], stats["start_slot"]) == (1, 0, 0)
        loop.close()


def test_environments_that_ignore_their_seed_are_told_by_their_first_observation() -> None:
    def stats(make_env: Any, run_seed: int) -> dict[str, Any]:
        with make_rig(gym_schema(make_env).schema) as rig:
            ctx = CollectorContext.for_rank(0, num_collectors=1, total_num_envs=2, run_seed=run_seed)
            loop = build_loop(partial(GymCollector, make_env=make_env, make_policy=Constant), ctx, rig.ring, None)
            assert "first_obs_digest" not in loop.stats()
            assert loop.run_once(0.0)
            loop.close()
            return dict(loop.stats())

    assert stats(Counter, 1)["first_obs_distinct"] == 2
    assert stats(Nested, 1)["first_obs_distinct"] == 1
    digests = [stats(make_env, seed)["first_obs_digest"] for make_env in (Counter, Nested) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == digests[4] == digests[5]


def test_errors_while_closing_are_raised(rig: Rig) -> None:
    loop = rig.loop(partial(Numbered, fault="close"))
    with pytest.raises(OSError, match="cannot close"):
        loop.close()


def test_plain_collector_needs_nothing_but_collect(rig: Rig) -> None:
    class Smallest(Collector):
        def __init__(self, ctx: CollectorContext) -> None:
            pass

        def collect(self, slot: Any) -> None:
            for array in slot.values():
                array[...] = 1

    loop = rig.loop(Smallest)
    rig.publish(1)
    assert loop.run_once(0.0)
    assert loop.stats()["episodes"] == 0
    loop.close()


class _Summing(Numbered):
    def sums(self) -> dict[str, float]:
        return {"reward/upright": 0.5 * self.calls}


def test_sums_of_a_collector_are_among_its_counters(rig: Rig) -> None:
    loop = rig.loop(_Summing)
    rig.publish(1)
    for _ in range(3):
        assert loop.run_once(0.0)
    assert loop.stats()["sum:reward/upright"] == 1.5
    loop.close()


def test_what_acts_after_a_wait_for_space_are_the_weights_of_now(rig: Rig) -> None:
    rig.publish(1)
    loop = rig.loop()
    while loop.run_once(0):
        pass
    # The ring is full.  A newer version comes, and space only after it: the next slot must be acted on by the newer one.
    assert not loop.run_once(0.01)
    rig.publish(2)
    read(rig.consumer)
    assert loop.run_once(0)
    assert read(rig.consumer)["versions"].tolist() == [2]


def test_weights_beyond_the_greatest_lag_do_not_act_whatever_the_interval(rig: Rig) -> None:
    rig.publish(1)
    loop = rig.loop(weight_poll_interval=1000, max_policy_lag=2)
    acted = []
    for version in range(2, 9):
        assert loop.run_once(0)
        acted.append(int(read(rig.consumer)["versions"][-1]))
        rig.publish(version)
    # Newest when acting: 1, 2, 3, ...; the loaded one stays until it is more than 2 behind.
    assert acted == [1, 1, 1, 4, 4, 4, 7]


def test_a_collector_whose_unread_slots_are_too_old_waits_and_nothing_is_dropped(rig: Rig) -> None:
    rig.publish(1)
    loop = rig.loop(max_policy_lag=2)
    assert loop.run_once(0)
    for version in (2, 3):
        rig.publish(version)
        assert loop.run_once(0)  # the oldest unread slot is of version 1: at most 2 behind
    rig.publish(4)
    assert not loop.run_once(0)  # there is space, and that slot is 3 behind
    assert rig.num_waits == 1
    taken = read(rig.consumer)
    assert loop.run_once(0)
    rest = read(rig.consumer)
    assert [*taken["versions"], *rest["versions"]] == [1, 2, 3, 4]
    assert [*taken["steps"], *rest["steps"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("already_waiting", [False, True])
def test_a_collector_that_waits_for_the_learner_to_catch_up_notices_the_end_of_its_ring(
    rig: Rig, already_waiting: bool
) -> None:
    rig.publish(1)
    loop = rig.loop(max_policy_lag=1)
    assert loop.run_once(0)
    rig.publish(3)
    assert not loop.run_once(0)
    waits = rig.num_waits

    def close_when_waiting() -> None:
        while rig.num_waits == waits:
            pass
        rig.consumer.close()

    with ThreadPoolExecutor(1) as pool:
        if already_waiting:
            pool.submit(close_when_waiting)
        else:
            rig.consumer.close()
        assert not loop.run_once(None)
    assert loop.finished
