"""Collectors for a loop that the user owns: :class:`CollectorPool`."""

from __future__ import annotations

from numa_collectors.pool._memory import MemoryPlan, bytes_by_node, check_memory, memory_plan
from numa_collectors.pool._options import PoolOptions, bind_request
from numa_collectors.pool._pool import CollectorPool

__all__ = [
    "CollectorPool",
    "MemoryPlan",
    "PoolOptions",
    "bind_request",
    "bytes_by_node",
    "check_memory",
    "memory_plan",
]
