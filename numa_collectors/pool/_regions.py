"""Every shared region of a run, on its planned node, before the first process starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from numa_collectors.collector.quota import SharedQuota
from numa_collectors.errors import NodeCapacityError
from numa_collectors.placement import Placement, WorkerPlacement
from numa_collectors.pool._memory import check_memory, memory_plan
from numa_collectors.pool._options import PoolOptions
from numa_collectors.rings import RING_LAYOUTS, Schema, TransitionRing
from numa_collectors.shm import Region, RegionPolicy
from numa_collectors.snapshots import WeightSnapshot, WeightSpec
from numa_collectors.topo import Topology
from numa_collectors.worker import ensure_descriptors

__all__ = ["Regions"]

_T = TypeVar("_T")


class Regions:
    """A ring, a snapshot and a quota for each collector; index = rank.

    Raises ``NodeCapacityError`` before anything is allocated where the memory is not there.
    """

    def __init__(
        self,
        schema: Schema,
        weights: WeightSpec,
        options: PoolOptions,
        placement: Placement,
        topology: Topology,
        say: Callable[[str], None],
    ) -> None:
        self._schema = schema
        self._weights = weights
        self._options = options
        self._resources: list[Any] = []
        check_memory(memory_plan(schema, weights, options, placement), topology, options.memory_policy, say)
        # A ring and a snapshot each, the quotas and a bell; a worker more, since a learner may be added to the collectors.
        ensure_descriptors(options.num_collectors + 1, 2 * options.num_collectors + 2)
        rings: list[TransitionRing] = []
        snapshots: list[WeightSnapshot] = []
        quotas: list[SharedQuota] = []
        try:
            quota_region = self._keep(Region.create("quotas", 8 * options.num_collectors))
            for worker in placement.collectors:
                rings.append(self._keep(self._make_ring(worker)))
                snapshots.append(self._keep(self._make_snapshot(worker)))
                quotas.append(self._keep(SharedQuota(quota_region, worker.rank)))
                quotas[-1].set(options.quota_slots)
            if len(rings) > 1:
                TransitionRing.share_bell(rings)
        except BaseException:
            self.close()
            raise
        self.rings, self.snapshots, self.quotas = tuple(rings), tuple(snapshots), tuple(quotas)

    def _make_ring(self, worker: WorkerPlacement) -> TransitionRing:
        options = self._options
        batched = self._schema.with_leading(options.envs_of(worker.rank))
        return self._on_node(
            lambda policy: RING_LAYOUTS[options.ring_layout].create(
                batched,
                capacity=options.ring_capacity,
                max_bytes=options.ring_max_bytes,
                max_lead_slots=options.max_lead_slots,
                node=worker.memory_node,
                policy=policy,
                toucher_cpus=worker.cpus,
                huge_pages=options.huge_pages,
                name=f"ring-{worker.rank}",
            )
        )

    def _make_snapshot(self, worker: WorkerPlacement) -> WeightSnapshot:
        return self._on_node(
            lambda policy: WeightSnapshot.create(
                self._weights,
                node=worker.memory_node,
                policy=policy,
                toucher_cpus=worker.cpus,
                huge_pages=self._options.huge_pages,
                name=f"weights-{worker.rank}",
            )
        )

    def _on_node(self, create: Callable[[RegionPolicy], _T]) -> _T:
        """Put a region strictly on its node, or, where the user's policy allows, elsewhere when that node is full."""
        if self._options.memory_policy == "none" or self._options.binding == "off":
            return create("none")
        try:
            return create("bind")
        except NodeCapacityError:
            if self._options.memory_policy == "bind":
                raise
            return create("preferred")

    def _keep(self, resource: Any) -> Any:
        self._resources.append(resource)
        return resource

    def close(self) -> None:
        """Free everything; idempotent.  What somebody still holds arrays of is unmapped with the last of them."""
        # In reverse: what was made last may hold views of what was made first.
        while self._resources:
            resource = self._resources.pop()
            try:
                resource.close()
            except BufferError:
                resource.region.close_when_unused()
                resource.close()
