"""What a pool is asked for, and what that means for the binding of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from numa_collectors.binding import BindMode, BindPolicy, BindRequest
from numa_collectors.collector import CollectorContext, shard
from numa_collectors.errors import ConfigError
from numa_collectors.placement import WorkerPlacement

__all__ = ["PoolOptions", "bind_request"]


@dataclass(frozen=True)
class PoolOptions:
    """How many collectors, how they are fed and watched; counts in environments and slots, times in seconds.

    ``quota_slots``: slots that each collector commits before it ends, None: until stopped.  ``learning_starts_slots``: slots
    in which to act at random.  ``generation``: that of the first start (a resumed run gives its collectors fresh seeds).

    With several pools in one run (one for each rank of ``torchrun``) ``learner_rank`` says which this is of
    ``num_learners`` alike: its collectors are ``learner_rank * num_collectors`` and following, in their names,
    contexts and seeds.  Everything else, also the ranks that ``drain`` and ``stats`` give, counts from 0 in each pool.
    """

    num_envs: int
    num_collectors: int = 1
    seed: int = 0
    quota_slots: int | None = None
    ring_capacity: int | None = None
    ring_max_bytes: int | None = None
    ring_layout: Literal["plain", "compact"] = "plain"
    max_lead_slots: int | None = None
    weight_poll_interval: int = 1
    max_policy_lag: int | None = None
    learning_starts_slots: int = 0
    check_finite: bool = True
    device: str = "cpu"
    binding: BindMode = "auto"
    memory_policy: BindPolicy = "preferred"
    huge_pages: bool = False
    on_collector_exit: Literal["raise", "restart", "continue"] = "raise"
    on_learner_exit: Literal["raise", "restart"] = "raise"
    min_collectors: int = 1
    max_restarts: int = 3
    restart_backoff_s: float = 1.0
    hang_timeout_s: float | None = 60.0
    start_timeout_s: float = 120.0
    shutdown_timeout_s: float = 10.0
    generation: int = 0
    learner_rank: int = 0
    num_learners: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.num_collectors <= self.num_envs:
            raise ConfigError(
                f"num_collectors: expected 1 to num_envs={self.num_envs}, got {self.num_collectors}; each collector needs an "
                "environment: lower num_collectors or raise num_envs"
            )

        if not 0 <= self.learner_rank < self.num_learners:
            raise ConfigError(
                f"learner_rank: expected 0 to num_learners - 1 = {self.num_learners - 1}, got {self.learner_rank}; count "
                "the pools of the run from 0"
            )

    def envs_of(self, rank: int) -> int:
        """Return the number of environments of collector ``rank`` (7 over 3 is 3/2/2)."""
        return shard(self.num_envs, self.num_collectors, rank)[1]

    @property
    def first_collector(self) -> int:
        """The run-wide number of this pool's first collector."""
        return self.learner_rank * self.num_collectors

    def context(self, rank: int, **fields: Any) -> CollectorContext:
        """Return what this pool's collector ``rank`` is told about itself; ``fields``: where it is placed."""
        return CollectorContext.for_rank(
            rank,
            num_collectors=self.num_collectors,
            total_num_envs=self.num_envs,
            run_seed=self.seed,
            learner=(self.learner_rank, self.num_learners),
            generation=self.generation,
            device=self.device,
            learning_starts_slots=self.learning_starts_slots,
            **fields,
        )


def bind_request(worker: WorkerPlacement, mode: BindMode, policy: BindPolicy) -> BindRequest:
    """Return what the binding layer is asked for to carry out ``worker``'s placement."""
    if worker.cpus is None and worker.memory_nodes is None:
        return BindRequest(mode="off", num_threads=worker.num_threads)
    return BindRequest(
        cpus=worker.cpus, memory_nodes=worker.memory_nodes, policy=policy, mode=mode, num_threads=worker.num_threads
    )
