"""Collectors of a pool are killed at planned and at random points; a loop of one's own goes on as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import sys
from functools import partial

import pytest

from numa_collectors.placement import Placement, PlacementRequest, plan, unbound
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.topo import Topology
from numa_collectors.worker import WorkerFailure
from tests.chaos.arms import TIMEOUT_S, Tally, nothing_left, num_kills
from tests.chaos.collecting import ChaosCollector, planned_end
from tests.chaos.payload import SCHEMA, WEIGHTS, Ledger, weights_of

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux"),
    pytest.mark.timeout(TIMEOUT_S),
]

PATIENCE_S = 600.0  # a bound for a loaded machine; a generation that dies while it starts delivers nothing
_SLOTS_PER_KILL = 40  # more than a generation makes before its planned end


class _Run:
    """One pool with a configuration drawn from ``seed``, the books of its consumer, and the kills from outside."""

    def __init__(self, seed: int, tally: Tally, num_generations: int, num_shots: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed, self.tally = seed, tally
        self.num_generations = num_generations
        num_collectors = rng.randint(1, 3)
        capacity = rng.choice([2, 3, 8, 64])
        self.options = PoolOptions(
            num_envs=num_collectors + rng.randint(0, 3),
            num_collectors=num_collectors,
            seed=seed,
            quota_slots=(num_generations + num_shots) * _SLOTS_PER_KILL,
            ring_capacity=capacity,
            max_lead_slots=rng.choice([None, 1, 2, capacity]),
            weight_poll_interval=rng.choice([1, 1, 3]),
            max_policy_lag=rng.choice([None, None, 2]),
            on_collector_exit="restart",
            max_restarts=10_000,
            restart_backoff_s=0.0,
            start_timeout_s=PATIENCE_S,
        )
        self.delays_s = tuple(rng.choice([0.0, 0.0, 0.001, 0.004]) for _ in range(num_collectors))
        self.max_slots = rng.choice([None, 1, 4])
        self.publish_interval = rng.choice([1, 2, 5])
        self.ledger = Ledger(num_collectors)
        # When the consumer has so many slots, one is killed; the target is whoever is there, in whatever phase.
        all_slots = num_collectors * num_generations * _SLOTS_PER_KILL
        self.shots = sorted(rng.randrange(1, all_slots) for _ in range(num_shots))
        self.shot: dict[tuple[int, int], str] = {}

    def placement(self) -> Placement:
        number = self.options.num_collectors
        if self.rng.random() < 0.5:
            return unbound(number, "drawn")
        return plan(Topology.discover(), PlacementRequest(num_collectors=number, oversubscribe=True))

    def run(self) -> None:
        collector = partial(
            ChaosCollector, seed=self.seed, num_generations=self.num_generations, delays_s=self.delays_s
        )
        pool = CollectorPool(
            collector,
            schema=SCHEMA,
            weights=WEIGHTS,
            options=self.options,
            placement=self.placement(),
            on_message=lambda text: None,
        )
        with pool:
            pool.publish(weights_of(1))
            self.loop(pool)
            made = [ring.committed for ring in pool.rings]
            failures = list(pool.failures)
        assert self.ledger.counts == made == [self.options.quota_slots] * self.options.num_collectors
        for failure in failures:
            self.count(failure)

    def loop(self, pool: CollectorPool) -> None:
        """The loop of a user: it drains, publishes and waits."""
        taken = 0
        for rank, span in pool.spans(self.max_slots, timeout_s=PATIENCE_S):
            batch = pool.tensors(rank, span)
            self.ledger.take(rank, {name: tensor.numpy() for name, tensor in batch.items()}, span)
            before, taken = taken, taken + span.num_slots
            if taken // self.publish_interval > before // self.publish_interval:
                pool.publish(weights_of(pool.exchange.version + 1))
            while self.shots and taken >= self.shots[0]:
                self.shots.pop(0)
                self.shoot(pool)

    def shoot(self, pool: CollectorPool) -> None:
        target = self.rng.choice(pool.collectors)
        phase = target.phase
        if target.pid is not None and target.exitcode is None:
            os.kill(target.pid, signal.SIGKILL)
            self.shot.setdefault((target.rank, target.generation), f"from outside, in phase {phase}")

    def count(self, failure: WorkerFailure) -> None:
        assert (failure.kind, failure.signal_name) == ("died", "SIGKILL"), str(failure)
        key = (failure.rank, failure.generation)
        point, _ = planned_end(self.seed, *key, self.num_generations) or ("", 0)
        self.tally.points[self.shot.get(key, point)] += 1


def test_a_loop_goes_on_over_the_deaths_of_its_collectors() -> None:
    tally, wanted = Tally("pool"), num_kills(short=12, share=0.85)
    while tally.num_kills < wanted:
        left = wanted - tally.num_kills
        with tally.run() as seed, nothing_left():
            _Run(seed, tally, num_generations=min(8, 1 + left // 4), num_shots=min(8, 1 + left // 4)).run()
    tally.show()
    assert "" not in tally.points, "a collector died that nobody had killed"
