"""The learner's loop: the algorithm on one screen.  It runs in the learner's own process, or inline with the collectors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from numa_collectors.exchange import Exchange
from numa_collectors.learner import DeviceIntake, Learner, WeightStager
from numa_collectors.trainer._governor import Governor

__all__ = ["LearnerCounters", "LearnerLoop", "LoopLimits"]


@dataclass
class LearnerCounters:
    """Cumulative counts and times of the learner in this session; ``slots`` by rank."""

    env_steps: int = 0
    updates: int = 0
    busy_ns: int = 0
    ingest_ns: int = 0
    wait_data_ns: int = 0
    publish_skips: int = 0
    bytes_ingested: int = 0
    slots: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class LoopLimits:
    """Env steps of this session; slots taken from one ring in one round; updates from one publication to the next."""

    target_env_steps: int
    max_ingest_slots: int
    publish_interval: int


class LearnerLoop:
    """Drains, updates and publishes; :meth:`step` is one round.

    ``num_envs[rank]`` is the shard of each collector, so that a slot of it counts as that many env steps.
    """

    def __init__(
        self,
        learner: Learner,
        exchange: Exchange,
        governor: Governor,
        *,
        intake: DeviceIntake,
        stager: WeightStager,
        num_envs: tuple[int, ...],
        limits: LoopLimits,
    ) -> None:
        self.learner = learner
        self.exchange = exchange
        self.governor = governor
        self.counters = LearnerCounters(slots=[0] * len(num_envs))
        self.train_metrics: Mapping[str, float] = {}
        self.generations = [0] * len(num_envs)
        self._intake = intake
        self._stager = stager
        self._num_envs = num_envs
        self._limits = limits
        self._updates_since_publish = 0
        self._staged = False

    def step(self, wait_s: float) -> bool:
        """Do one round, waiting at most ``wait_s`` seconds for data where nothing else can be done.

        Returns whether nothing is left to do: the target is ingested, or every ring has ended, and what is owed is paid.
        """
        # What is owed is paid before anything more is ingested: full rings then hold the collectors back, which bounds
        # how stale the data can be.
        arrived = 0 if self.governor.owed or self.complete else self._ingest()
        due = self.governor.due()
        if (self.complete or self.exchange.finished) and not self.governor.owed:
            return True
        if due:
            self._update(due)
        elif not arrived:
            self._wait_for_data(wait_s)
        self._publish()
        return False

    @property
    def complete(self) -> bool:
        """Whether the target is ingested."""
        return self.counters.env_steps >= self._limits.target_env_steps

    def _ingest(self) -> int:
        """Hand everything that is committed, up to the cap a ring, to the learner; returns the number of slots."""
        started = time.perf_counter_ns()
        arrived = 0
        for rank, span in self.exchange.drain(self._limits.max_ingest_slots, load=self._intake.load):
            batch = self._intake.tensors(rank, span)
            self.learner.ingest(rank, batch)
            arrived += span.num_slots
            env_steps = span.num_slots * self._num_envs[rank]
            self.counters.slots[rank] += span.num_slots
            self.generations[rank] = max(self.generations[rank], int(span.generations[-1]))
            self.counters.env_steps += env_steps
            # Nothing is owed for what comes beyond the target (a survivor rounds a dead collector's rest up to whole slots):
            # the updates of a strict run are a function of its configuration alone, so that ranks never differ in them.
            self.governor.ingested = min(self.governor.ingested + env_steps, self._limits.target_env_steps)
            self.counters.bytes_ingested += span.num_slots * self.exchange.consumers[rank].memory.schema.slot_bytes
        self.counters.ingest_ns += time.perf_counter_ns() - started
        return arrived

    def _update(self, num_updates: int) -> None:
        started = time.perf_counter_ns()
        self.train_metrics = self.learner.update(num_updates)
        self.governor.done += num_updates
        self.counters.updates += num_updates
        self._updates_since_publish += num_updates
        self.counters.busy_ns += time.perf_counter_ns() - started

    def _wait_for_data(self, timeout_s: float) -> None:
        if timeout_s <= 0.0:
            return
        if self._staged:
            # Idle anyway: weights that are still on their way go out now, not after the data that waits for them.
            self._stager.wait()
            self._send()
        started = time.perf_counter_ns()
        self.exchange.wait(timeout_s, self._slots_worth_waking_for())
        self.counters.wait_data_ns += time.perf_counter_ns() - started

    def _slots_worth_waking_for(self) -> int:
        """Return 1, or up to a round's worth where no update is due before each collector has brought two slots."""
        missing_slots = self.governor.missing // max(self._num_envs)
        if missing_slots < 2 * len(self._num_envs):
            return 1
        return min(missing_slots, self._limits.max_ingest_slots * len(self._num_envs))

    def _publish(self) -> None:
        """Publish when enough updates have been made since the last time; never waits for a copy that is in flight."""
        if self._staged and self._stager.ready:
            self._send()
        if self._updates_since_publish < self._limits.publish_interval:
            return
        if self._staged:
            self.counters.publish_skips += 1
            return
        self._stager.stage(self.learner.weights())
        self._staged = True
        self._updates_since_publish = 0
        if self._stager.ready:
            self._send()

    def _send(self) -> None:
        self.exchange.publish(self._stager.buffer)
        self._staged = False

    def publish_now(self) -> int:
        """Publish the present weights and return their version; used before the first transition and after the last."""
        self._stager.stage(self.learner.weights())
        self._stager.wait()
        self._send()
        self._updates_since_publish = 0
        return self.exchange.version

    def ingest_rest(self) -> None:
        """Take in every slot that is still committed, without a cap; used when a run is interrupted."""
        while self._ingest():
            pass
