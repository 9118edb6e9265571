"""Collectors for a loop that the user owns: :class:`CollectorPool`."""

from __future__ import annotations

from numa_collectors.pool._options import MemoryPlan, PoolOptions, bind_request, memory_plan
from numa_collectors.pool._pool import CollectorPool

__all__ = ["CollectorPool", "MemoryPlan", "PoolOptions", "bind_request", "memory_plan"]
