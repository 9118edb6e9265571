"""What a pool is asked for, and what that means in bytes and bindings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numa_collectors.binding import BindMode, BindPolicy, BindRequest
from numa_collectors.collector import shard
from numa_collectors.errors import ConfigError
from numa_collectors.placement import Placement, WorkerPlacement
from numa_collectors.rings import Schema
from numa_collectors.rings.layout import choose_capacity, ring_bytes
from numa_collectors.snapshots import WeightSpec
from numa_collectors.snapshots.memory import snapshot_bytes

__all__ = ["MemoryPlan", "PoolOptions", "bind_request", "memory_plan"]


@dataclass(frozen=True)
class PoolOptions:
    """How many collectors, how they are fed and watched; counts in environments and slots, times in seconds.

    ``quota_slots``: slots that each collector commits before it ends, None: until stopped.  ``learning_starts_slots``: slots
    in which to act at random.  ``generation``: that of the first start (a resumed run gives its collectors fresh seeds).
    """

    num_envs: int
    num_collectors: int = 1
    seed: int = 0
    quota_slots: int | None = None
    ring_capacity: int | None = None
    ring_max_bytes: int | None = None
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

    def __post_init__(self) -> None:
        if not 1 <= self.num_collectors <= self.num_envs:
            raise ConfigError(
                f"num_collectors: expected 1 to num_envs={self.num_envs}, got {self.num_collectors}; each collector needs an "
                "environment: lower num_collectors or raise num_envs"
            )

    def envs_of(self, rank: int) -> int:
        """Return the number of environments of collector ``rank`` (7 over 3 is 3/2/2)."""
        return shard(self.num_envs, self.num_collectors, rank)[1]


@dataclass(frozen=True)
class MemoryPlan:
    """One shared region of a run before it exists: what for, how large, and on which node (None: anywhere)."""

    name: str
    num_bytes: int
    node: int | None


def memory_plan(
    schema: Schema, weights: WeightSpec, options: PoolOptions, placement: Placement
) -> tuple[MemoryPlan, ...]:
    """Return every shared region that a pool of ``options`` would make."""
    plans = []
    for worker in placement.collectors:
        batched = schema.with_leading(options.envs_of(worker.rank))
        slots = choose_capacity(batched, options.ring_capacity, options.ring_max_bytes)
        plans.append(MemoryPlan(f"ring[{worker.rank}]", ring_bytes(batched, slots), worker.memory_node))
        plans.append(MemoryPlan(f"weights[{worker.rank}]", snapshot_bytes(weights), worker.memory_node))
    return tuple(plans)


def bind_request(worker: WorkerPlacement, mode: BindMode, policy: BindPolicy) -> BindRequest:
    """Return what the binding layer is asked for to carry out ``worker``'s placement."""
    if worker.cpus is None and worker.memory_nodes is None:
        return BindRequest(mode="off", num_threads=worker.num_threads)
    return BindRequest(
        cpus=worker.cpus, memory_nodes=worker.memory_nodes, policy=policy, mode=mode, num_threads=worker.num_threads
    )
