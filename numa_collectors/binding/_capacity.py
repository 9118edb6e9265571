"""Whether a node can hold what is planned for it, before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numa_collectors import _nodes

if TYPE_CHECKING:
    from numa_collectors.topo.model import Topology

__all__ = ["check_capacity", "headroom_bytes"]


def check_capacity(topology: Topology | None, node: int | None, need_bytes: int, *, what: str = "the plan") -> None:
    """Raise ``NodeCapacityError`` if ``node`` cannot hold ``need_bytes``; it says need, have and where.

    With a topology its figures count (free memory and half of the reclaimable, less the kernel's watermarks; what is
    left under the cgroups' memory limits); ``None`` asks the running kernel.  ``node=None`` stands for all nodes that
    the process may allocate from.
    """
    place = "this process's NUMA nodes" if node is None else f"node {node}"
    if topology is None:
        _nodes.check_room(what, need_bytes, (place, _nodes.node_headroom_bytes(node)), _nodes.cgroup_place())
    else:
        limit = ("the cgroup's memory limit", topology.memory_headroom_bytes)
        _nodes.check_room(what, need_bytes, (place, headroom_bytes(topology, node)), limit)


def headroom_bytes(topology: Topology, node: int | None) -> int:
    """Return what :func:`check_capacity` takes for free on ``node`` (None: on all nodes that may be allocated from)."""
    nodes = topology.nodes if node is None else (topology.node(node),)
    usable = [one for one in nodes if one.id in topology.nodes_allowed]
    return sum(_nodes.available_bytes(one.free_bytes, one.reclaimable_bytes, one.memory_bytes) for one in usable)
