"""Memory reckoned before anything exists: what each region takes, and whether nodes and cgroup limits have it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from numa_collectors.binding import BindPolicy, check_capacity
from numa_collectors.errors import NodeCapacityError
from numa_collectors.placement import Placement
from numa_collectors.pool._options import PoolOptions
from numa_collectors.rings import RING_LAYOUTS, Schema
from numa_collectors.snapshots import WeightSpec
from numa_collectors.snapshots.memory import snapshot_bytes
from numa_collectors.topo import Topology

__all__ = ["MemoryPlan", "bytes_by_node", "check_memory", "memory_plan"]

_WHAT = "the rings and weight snapshots of this run"


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
        ring = RING_LAYOUTS[options.ring_layout].plan(
            batched, capacity=options.ring_capacity, max_bytes=options.ring_max_bytes
        )
        plans.append(MemoryPlan(f"ring[{worker.rank}]", ring.num_bytes, worker.memory_node))
        plans.append(MemoryPlan(f"weights[{worker.rank}]", snapshot_bytes(weights), worker.memory_node))
    return tuple(plans)


def bytes_by_node(plans: Iterable[MemoryPlan]) -> Mapping[int | None, int]:
    """Return the bytes of all regions by the node that they are planned for (None: any)."""
    needs: dict[int | None, int] = {}
    for region in plans:
        needs[region.node] = needs.get(region.node, 0) + region.num_bytes
    return needs


def check_memory(
    plans: Iterable[MemoryPlan], topology: Topology, policy: BindPolicy, say: Callable[[str], None]
) -> None:
    """Raise ``NodeCapacityError`` where the regions do not fit, together or, with the policy ``bind``, on each node.

    Otherwise ``say`` is told of a node that is short: memory of others will be used.
    """
    needs = bytes_by_node(plans)
    # All of them count against one cgroup limit, and what one node lacks comes from the others.
    check_capacity(topology, None, sum(needs.values()), what=_WHAT)
    for node, num_bytes in needs.items():
        if node is None:
            continue
        try:
            check_capacity(topology, node, num_bytes, what=_WHAT)
        except NodeCapacityError as error:
            if policy == "bind":
                raise
            say(f"{error}; memory of other nodes will be used (memory_policy={policy!r})")
