"""The collector in its own process: seeds, quota, stop, restart, and failures that say who, where and when."""

from __future__ import annotations

import contextlib
import os
import random
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from numa_collectors.binding import BindRequest
from numa_collectors.collector import (
    Collector,
    CollectorContext,
    CollectorFactory,
    CollectorOptions,
    CollectorWorker,
    GymCollector,
    gym_schema,
)
from numa_collectors.collector.quota import SharedQuota
from numa_collectors.errors import ConfigError, RingClosedError
from numa_collectors.rings import Field, Schema, TransitionRing
from numa_collectors.shm import Region
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec
from numa_collectors.worker import WorkerGroup, WorkerState
from tests.collector.envs import Constant, Counter, Numbered

TIMEOUT_S = 30.0
PLAIN = Schema([Field("obs", "float32", (3,)), Field("reward", "float32", ())])
NUMBERS = Schema([Field("number", "float64", (4,))])


class Weighted(Constant):
    """Acts with the newest weight."""

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self.value = float(weights["w"][0])


class Seeded(Collector):
    """Writes what the process's own generators give, and how it is bound."""

    def __init__(self, ctx: CollectorContext) -> None:
        self._numbers = [random.random(), float(np.random.random()), float(ctx.seed), float(len(ctx.cpus or ()))]

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        slot["number"][...] = self._numbers


@contextlib.contextmanager
def far_ends(schema: Schema, num_envs: int = 2, **options: Any) -> Iterator[tuple[TransitionRing, WeightSnapshot]]:
    with (
        TransitionRing.create(schema.with_leading(num_envs), **{"capacity": 8, **options}) as ring,
        WeightSnapshot.create(WeightSpec([TensorSpec("w", "float32", (1,))])) as snapshot,
    ):
        yield ring, snapshot


def drain(ring: TransitionRing) -> list[dict[str, np.ndarray]]:
    """Return the slots that come until the collector says that nothing more will."""
    slots: list[dict[str, np.ndarray]] = []
    with ring.consumer() as consumer, contextlib.suppress(RingClosedError):
        while consumer.wait(TIMEOUT_S):
            span = consumer.peek()
            assert span is not None
            for index in range(span.num_slots):
                slot = {name: span[name][index].copy() for name in span}
                slots.append({**slot, "version": span.versions[index], "step": span.steps[index]})
            consumer.release(span.num_slots)
        pytest.fail(f"nothing came for {TIMEOUT_S} s")
    return slots


def context(rank: int = 0, **fields: Any) -> CollectorContext:
    return CollectorContext.for_rank(rank, num_collectors=2, total_num_envs=4, run_seed=3, **fields)


def test_unpicklable_factory_is_refused_before_any_process_starts() -> None:
    with far_ends(PLAIN) as (ring, snapshot), pytest.raises(ConfigError, match="the collector factory cannot be sent"):
        CollectorWorker(lambda ctx: Numbered(ctx), context(), ring, snapshot)


def test_gym_collector_in_a_process_fills_its_quota() -> None:
    factory: CollectorFactory = partial(GymCollector, make_env=Counter, make_policy=Weighted)
    with far_ends(gym_schema(Counter).schema) as (ring, snapshot), snapshot.publisher() as publisher:
        worker = CollectorWorker(factory, context(), ring, snapshot, CollectorOptions(quota_slots=50))
        with WorkerGroup([worker]) as group:
            group.start()
            group.wait_ready(TIMEOUT_S)
            # It waits for the first weights, and not a slot is acted on without them.
            while worker.stats is None:
                assert worker.failure is None
                group.wait(TIMEOUT_S)
            assert ring.committed == 0
            publisher.publish({"w": np.full(1, 0.5, np.float32)}, 1)
            slots = drain(ring)
            assert worker.join(TIMEOUT_S)
        assert (worker.state, worker.failure) == (WorkerState.EXITED, None)
        assert worker.finished
        stats = worker.stats
    assert [slot["step"] for slot in slots] == list(range(50))
    assert {int(slot["version"]) for slot in slots} == {1}
    assert all((slot["action"] == 0.5).all() for slot in slots)
    assert (stats["slots"], stats["env_steps"], stats["episodes"], stats["return_sum"]) == (50, 100, 20, 300.0)
    assert stats["first_obs_distinct"] == 2
    assert min(stats["env_step_ns"], stats["act_ns"], stats["wait_weights_s"]) > 0


def test_processes_are_seeded_and_told_their_cpus() -> None:
    cpus = (min(os.sched_getaffinity(0)),)

    bind, options = BindRequest(cpus=cpus, policy="none"), CollectorOptions(quota_slots=1)
    with far_ends(NUMBERS) as (one, _), far_ends(NUMBERS) as (two, _):
        rings = {one: context(0), two: context(1)}
        workers = [CollectorWorker(Seeded, ctx, ring, None, options, bind=bind) for ring, ctx in rings.items()]
        with WorkerGroup(workers) as group:
            group.start()
            first, second = ([float(value) for value in drain(ring)[0]["number"][0]] for ring in rings)
            assert all(worker.join(TIMEOUT_S) for worker in workers)
    # The run's own seed for collector 0, and one CPU each.
    assert first == [random.Random(3).random(), float(np.random.RandomState(3).random()), 3, 1]
    assert second[3] == 1
    assert all(a != b for a, b in zip(first[:3], second[:3], strict=True))


def test_stop_while_the_ring_is_full_is_orderly() -> None:
    with far_ends(PLAIN, capacity=2) as (ring, _):
        worker = CollectorWorker(Numbered, context(), ring, None)
        with WorkerGroup([worker]) as group, ring.consumer() as consumer:
            group.start()
            group.wait_ready(TIMEOUT_S)
            while ring.fill < 2:
                assert consumer.wait(TIMEOUT_S)
            worker.request_stop()
            assert worker.join(TIMEOUT_S)
            assert worker.failure is None
            span = consumer.peek()
            assert span is not None
            assert span.num_slots == 2
            consumer.release(2)
            assert consumer.closed
        assert worker.stats["slots"] == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "step",
            r"collector\[1\], environment 2 .*the environment raised RuntimeError in step\(\): cannot step \(step 2\)",
        ),
        ("reset", r"collector\[1\], environment 2 .*RuntimeError in reset\(\): cannot reset"),
        ("nan_obs", r"collector\[1\], environment 2 .*step 2, field 'next_obs': expected finite values, got nan"),
    ],
)
def test_failure_record_names_environment_and_step(fault: str, message: str) -> None:
    factory = partial(GymCollector, make_env=partial(Counter, fault=fault), make_policy=Constant)
    with far_ends(gym_schema(Counter).schema) as (ring, _), ring.consumer() as consumer:
        worker = CollectorWorker(factory, context(1), ring, None)
        with WorkerGroup([worker]) as group:
            group.start()
            assert worker.join(TIMEOUT_S)
            failure = worker.failure
        assert failure is not None
        assert worker.state is WorkerState.FAILED
        assert re.search(message, str(failure)), str(failure)
        # Nothing half-written is delivered, and it does not pass for a collector that has finished.
        assert ring.committed == (0 if fault == "reset" else 2)
        assert not consumer.closed


def test_restarted_generation_completes_the_quota() -> None:
    factory: CollectorFactory = partial(Numbered, fault="raise")
    with far_ends(PLAIN) as (ring, _):
        worker = CollectorWorker(factory, context(), ring, None, CollectorOptions(quota_slots=4))
        with WorkerGroup([worker]) as group:
            group.start()
            assert worker.join(TIMEOUT_S)
            assert worker.failure is not None
            assert ring.committed == 2
            following = group.restart(worker)
            slots = drain(ring)
            assert following.join(TIMEOUT_S)
            assert following.failure is None
        assert (following.stats["generation"], following.stats["start_slot"], following.stats["slots"]) == (1, 2, 2)
    assert [slot["step"] for slot in slots] == [0, 1, 2, 3]


def test_quota_in_shared_memory_reaches_the_process() -> None:
    with (
        far_ends(PLAIN) as (ring, _),
        Region.create("quota", 4096) as region,
        contextlib.closing(SharedQuota(region, 1)) as quota,
    ):
        quota.set(3)
        worker = CollectorWorker(Numbered, context(), ring, None, quota_slots=quota)
        with WorkerGroup([worker]) as group:
            group.start()
            assert [slot["step"] for slot in drain(ring)] == [0, 1, 2]
            assert worker.join(TIMEOUT_S)
            assert worker.failure is None
