"""Collectors with their rings and snapshots, started, watched and ended together, for a loop that the user owns.

Guarantees
    * Every region exists, on its planned node, before the first process starts; a shortage is an error before that.
    * A collector's death costs only itself: what it committed is delivered, what it was writing is not.
    * ``close`` leaves no process, no descriptor and no shared memory, from wherever it is called.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch

from numa_collectors.binding import BindReport
from numa_collectors.collector import (
    CollectorFactory,
    CollectorOptions,
    CollectorWorker,
    check_picklable,
)
from numa_collectors.exchange import Exchange
from numa_collectors.learner import DeviceIntake, WeightStager
from numa_collectors.placement import Placement, PlacementRequest, plan, unbound
from numa_collectors.pool._options import PoolOptions, bind_request
from numa_collectors.pool._regions import Regions
from numa_collectors.rings import Schema, Span
from numa_collectors.snapshots import WeightSpec
from numa_collectors.topo import Topology
from numa_collectors.worker import PinnedWorker, WorkerFailure, WorkerGroup, WorkerState, raise_failure

__all__ = ["CollectorPool"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_POLL_S = 0.1


class CollectorPool:
    """N collectors; a context manager that starts them on entry and leaves nothing behind on exit.

    ``collector`` is a picklable factory ``(ctx) -> Collector``, ``schema`` the fields of one transition of **one** environment
    (a ring's slot holds one of each environment of its collector), ``weights`` what the collectors need to act.  ``placement``
    left out is planned for this machine.

    In a loop of your own::

        with CollectorPool(make_collector, schema=schema, weights=spec, options=options) as pool:
            pool.publish(policy.state_dict())
            while training:
                for rank, span in pool.drain(max_slots=8):
                    buffer.add(rank, pool.tensors(rank, span))
                ...
                pool.publish(policy.state_dict())
    """

    def __init__(
        self,
        collector: CollectorFactory,
        *,
        schema: Schema,
        weights: WeightSpec,
        options: PoolOptions,
        placement: Placement | None = None,
        topology: Topology | None = None,
        on_message: Callable[[str], None] | None = None,
        on_restart: Callable[[PinnedWorker], None] | None = None,
    ) -> None:
        check_picklable(collector, "the collector factory")
        self.options = options
        self.schema = schema
        self.weights = weights
        topology = Topology.discover() if topology is None else topology
        self.placement = self._plan(topology) if placement is None else placement
        self.failures: list[WorkerFailure] = []
        self._say = on_message or logger.warning
        self._on_restart = on_restart
        self._exchange: Exchange | None = None
        self._intake: DeviceIntake | None = None
        self._stager: WeightStager | None = None
        self._restarts: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._dropped: set[int] = set()
        self._regions = Regions(schema, weights, options, self.placement, topology, self._say)
        self.rings, self.snapshots = self._regions.rings, self._regions.snapshots
        try:
            self._group = self._make_group(collector)
        except BaseException:
            self._regions.close()
            raise

    # before anything starts

    def _plan(self, topology: Topology) -> Placement:
        if self.options.binding == "off":
            return unbound(self.options.num_collectors, "binding=off: nothing is bound")
        return plan(topology, PlacementRequest(num_collectors=self.options.num_collectors))

    def _make_group(self, collector: CollectorFactory) -> WorkerGroup:
        options = self.options
        workers: list[PinnedWorker] = []
        for worker in self.placement.collectors:
            workers.append(
                CollectorWorker(
                    collector,
                    options.context(worker.rank, cpus=worker.cpus, node=worker.node),
                    self.rings[worker.rank],
                    self.snapshots[worker.rank],
                    CollectorOptions(
                        weight_poll_interval=options.weight_poll_interval,
                        check_finite=options.check_finite,
                        max_policy_lag=options.max_policy_lag,
                        idle_at_quota=True,
                    ),
                    quota_slots=self._regions.quotas[worker.rank],
                    bind=bind_request(worker, options.binding, options.memory_policy),
                )
            )
        return WorkerGroup(
            workers,
            hang_timeout_s=options.hang_timeout_s,
            start_timeout_s=options.start_timeout_s,
            shutdown_timeout_s=options.shutdown_timeout_s,
        )

    # life

    def add(self, worker: PinnedWorker) -> None:
        """Have a further worker (a learner, an evaluator) started, watched and stopped with the pool's; before ``start``."""
        self._group.workers.append(worker)

    def start(self, cancelled: Callable[[], bool] | None = None) -> list[BindReport]:
        """Start all workers and wait until they are ready; return what each binding was found to be, collectors first.

        Returns an empty list as soon as ``cancelled()`` is true; workers may then be at any point of their start.
        """
        deadline = time.monotonic() + self.options.start_timeout_s
        self._group.start()
        starting = (WorkerState.CREATED, WorkerState.STARTING)
        while any(worker.state in starting for worker in self.workers) and time.monotonic() < deadline:
            if cancelled is not None and cancelled():
                return []
            if any(worker.failure is not None for worker in self.workers):
                break
            self._group.wait(_POLL_S)
        return self._group.wait_ready(max(0.0, deadline - time.monotonic()))

    def poll(self) -> list[WorkerFailure]:
        """Notice deaths and hangs, and restart what is due; never blocks.

        Returns the failures that the run survives; raises ``WorkerFailedError`` for one that it does not.
        """
        survived = [failure for failure in self._group.poll() if self._survives(failure)]
        now = time.monotonic()
        for worker in [worker for worker in self.workers if self._due_s.get(worker.name, math.inf) <= now]:
            del self._due_s[worker.name]
            following = self._group.restart(worker)
            if self._on_restart is not None:
                self._on_restart(following)
            self._say(f"{worker.name} restarted as generation {following.generation}")
        return survived

    def wait_for_news(self, timeout_s: float) -> None:
        """Block until a worker has a message or ends, for at most ``timeout_s`` seconds."""
        self._group.wait(timeout_s)

    def _survives(self, failure: WorkerFailure) -> bool:
        """Do what the options say about ``failure``; raise where that is the end of the run."""
        self.failures.append(failure)
        name = failure.name
        if name not in {worker.name for worker in self.collectors}:
            if not (failure.role == "learner" and self.options.on_learner_exit == "restart" and self._restart(failure)):
                raise_failure(failure)
            return True
        if failure.finished:
            self._say(f"{failure.summary}; its transitions are complete, the run goes on")
            return True
        if self.options.on_collector_exit == "restart" and self._restart(failure):
            return True
        live = self.options.num_collectors - len(self._dropped) - 1
        if self.options.on_collector_exit == "continue" and live >= max(1, self.options.min_collectors):
            self._drop(failure.rank - self.options.first_collector)
            self._say(f"{failure}\nthe run goes on with {live} collectors")
            return True
        raise_failure(failure)
        return False

    def _restart(self, failure: WorkerFailure) -> bool:
        """Plan the next generation of the worker that failed, unless its budget is spent."""
        done = self._restarts.get(failure.name, 0)
        if done >= self.options.max_restarts:
            return False
        pause_s = self.options.restart_backoff_s * 2**done
        self._restarts[failure.name] = done + 1
        self._due_s[failure.name] = time.monotonic() + pause_s
        self._say(f"{failure}\nrestart {done + 1} of {self.options.max_restarts} in {pause_s:g} s")
        return True

    def _drop(self, rank: int) -> None:
        """Go on without collector ``rank``: its ring ends, its remaining env steps go to the others."""
        self._dropped.add(rank)
        self.rings[rank].set_producer_lost()
        quota = self._regions.quotas[rank]()
        if quota is not None:
            self.add_to_quotas((quota - self.rings[rank].committed) * self.options.envs_of(rank))

    def add_to_quotas(self, env_steps: int) -> None:
        """Have the live collectors make at least ``env_steps`` more, together; also those that had made theirs."""
        others = [rank for rank in range(self.options.num_collectors) if rank not in self._dropped]
        more_slots = math.ceil(env_steps / sum(self.options.envs_of(rank) for rank in others))
        for rank in others:
            quota = self._regions.quotas[rank]()
            self._regions.quotas[rank].set(None if quota is None else quota + more_slots)

    @property
    def workers(self) -> Sequence[PinnedWorker]:
        """All workers, collectors first, by rank."""
        return tuple(self._group.workers)

    @property
    def collectors(self) -> Sequence[PinnedWorker]:
        """The collectors' present workers, by rank."""
        return tuple(self._group.workers[: self.options.num_collectors])

    @property
    def num_restarts(self) -> int:
        """Restarts of all workers together."""
        return sum(self._restarts.values())

    def stats(self) -> dict[int, Mapping[str, Any]]:
        """Return the newest cumulative counters of each collector's present generation, by rank."""
        return {rank: worker.stats for rank, worker in enumerate(self.collectors) if worker.stats is not None}

    def stop(self, timeout_s: float | None = None) -> list[WorkerFailure]:
        """End all workers within one deadline; idempotent.  Committed slots stay readable until :meth:`close`."""
        return self._group.stop(timeout_s)

    def kill(self) -> None:
        """End all workers at once."""
        self._group.kill()

    def close(self) -> None:
        """Stop the workers and free the regions; idempotent."""
        try:
            self._group.stop()
        finally:
            self._close_regions()

    def _close_regions(self) -> None:
        if self._intake is not None:
            self._intake.close()
        self._exchange = self._intake = None
        self._regions.close()

    def __enter__(self) -> CollectorPool:
        try:
            self.start()
        except BaseException:
            self.kill()
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # the learner's side, for a loop in this process

    @property
    def exchange(self) -> Exchange:
        """The reading ends of all rings and the writing ends of all snapshots, opened in this process on first use."""
        if self._exchange is None:
            self._exchange = Exchange(self.rings, self.snapshots)
        return self._exchange

    @property
    def finished(self) -> bool:
        """Whether every collector has made its quota, or ended, and everything was drained."""
        return all(
            consumer.closed or (consumer.fill == 0 and self._has_made_its_quota(rank))
            for rank, consumer in enumerate(self.exchange.consumers)
        )

    def _has_made_its_quota(self, rank: int) -> bool:
        quota = self._regions.quotas[rank]()
        return quota is not None and self.rings[rank].committed >= quota

    def drain(self, max_slots: int | None = None) -> Iterator[tuple[int, Span]]:
        """Yield ``(rank, span)`` for what is there now, at most ``max_slots`` slots a ring; see :meth:`Exchange.drain`.

        Raises ``WorkerFailedError`` where a collector has failed and the options do not let the run go on.
        """
        self.poll()
        yield from self.exchange.drain(max_slots)

    def wait(self, timeout_s: float, min_slots: int = 1) -> bool:
        """Wait for a slot; False after ``timeout_s`` seconds or when every ring has ended.  Raises as :meth:`drain`.

        A loop that has nothing to do before more than one slot is there lets ``min_slots`` come together, over all rings,
        for at most 5 ms more; see :meth:`Exchange.wait`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.exchange.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())), min_slots):
            self.poll()
            if self.finished or time.monotonic() >= deadline:
                return False
        return not self.finished

    def spans(self, max_slots: int | None = None, *, timeout_s: float = 60.0) -> Iterator[tuple[int, Span]]:
        """Yield spans until every collector has ended; ``TimeoutError`` when nothing comes for ``timeout_s`` seconds."""
        while not self.finished:
            yield from self.drain(max_slots)
            if not self.wait(timeout_s) and not self.finished:
                raise TimeoutError(f"no collector delivered a slot for {timeout_s:g} s")

    def tensors(self, rank: int, span: Span) -> dict[str, torch.Tensor]:
        """Return a span's fields as CPU tensors ``(num_slots, num_envs_of_rank, *shape)`` that share the ring's memory.

        Valid until the next span is asked for; copy what is kept, write nothing into them.
        """
        if self._intake is None:
            self._intake = DeviceIntake(self.exchange, "cpu")
        return self._intake.tensors(rank, span)

    def publish(self, weights: Mapping[str, Any]) -> int:
        """Give new weights (tensors or arrays, as the spec names them) to all collectors; return the version.

        Never waits for a collector.  Collectors do not act before the first version.
        """
        if self._stager is None:
            self._stager = WeightStager(self.weights, "cpu")
        self._stager.stage({name: torch.as_tensor(value) for name, value in weights.items()})
        return self.exchange.publish(self._stager.buffer)
