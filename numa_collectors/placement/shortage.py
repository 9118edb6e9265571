"""Refusing what cannot fit, with what was asked, what is allowed, and which set is short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numa_collectors._cpulist import format_cpulist
from numa_collectors.errors import PlacementError
from numa_collectors.placement.cores import UsableCore, cores_by_node, num_cpus
from numa_collectors.placement.model import PlacementRequest
from numa_collectors.topo.model import Topology

__all__ = ["check_request", "shortage"]

_MAX_NODES_NAMED = 8


def check_request(topology: Topology, request: PlacementRequest) -> None:
    """Raise ``PlacementError`` for what could fit on no machine, and for nodes that this one cannot give."""
    for name, value, least in (
        ("num_collectors", request.num_collectors, 1),
        ("cpus_per_collector", request.cpus_per_collector, 1),
        ("learner_cpus", request.learner_cpus, 0),
        ("learner_gpu", request.learner_gpu, 0),
    ):
        if value is not None and value < least:
            raise PlacementError(f"expected {name} of at least {least}, got {value}")
    asked = request.numa_nodes
    if isinstance(asked, str) and asked != "auto":
        raise PlacementError(f"expected numa_nodes to be 'auto' or node ids, got {asked!r}")
    if isinstance(asked, tuple) and not asked:
        raise PlacementError("expected numa_nodes to be 'auto' or at least one node id, got an empty list")
    if not request.binds:
        return
    usable = cores_by_node(topology)
    for node in asked if isinstance(asked, tuple) else ():
        _check_node(topology, usable, "numa_nodes", node)
    if request.learner_node is not None:
        _check_node(topology, usable, "learner_node", request.learner_node)
    if not usable:
        raise PlacementError(
            f"none of the allowed CPUs {format_cpulist(topology.allowed)} belongs to a NUMA node: nothing can be bound"
        )


def _check_node(topology: Topology, usable: Mapping[int, Sequence[UsableCore]], name: str, node_id: int) -> None:
    if node_id in usable:
        return
    expected = f"{name}: expected nodes that can hold workers (here {format_cpulist(usable)}), got {node_id}"
    remedy = "name others, or see what there is with python -m numa_collectors.topo"
    found = next((node for node in topology.nodes if node.id == node_id), None)
    if found is None:
        raise PlacementError(f"{expected}, which does not exist or is offline; {remedy}")
    if not found.cpus:
        what = {"device": "holds a device's memory", "empty": "is empty"}.get(found.kind, "has memory only")
        raise PlacementError(f"{expected}, which {what} and has no CPUs; {remedy}")
    raise PlacementError(
        f"{expected}, whose CPUs {format_cpulist(found.cpus)} this process may not use: its affinity and cpuset leave it CPUs "
        f"{format_cpulist(topology.allowed)}; {remedy}"
    )


def shortage(
    topology: Topology,
    request: PlacementRequest,
    cores: Mapping[int, Sequence[UsableCore]],
    nodes: Sequence[int],
    learner_node: int,
) -> str:
    """Return the message for a request that does not fit."""
    each = request.cpus_per_collector or 1
    learner = request.learner_cpus or 0
    needed = each * request.num_collectors + learner
    asked = f"asked for {request.num_collectors} collectors x {each} CPU{'s' if each > 1 else ''}"
    if learner:
        asked += f" and {learner} for the learner on node {learner_node}"
    if isinstance(request.numa_nodes, tuple):
        asked += f", on nodes {format_cpulist(request.numa_nodes)}"
    own = {node: cores[node] for node in dict.fromkeys((*nodes, learner_node))}
    have = ", ".join(f"node {node} has {num_cpus(cores[node])}" for node in list(own)[:_MAX_NODES_NAMED])
    have += f" and so on ({len(own)} nodes)" if len(own) > _MAX_NODES_NAMED else ""
    if topology.cpu_budget < min(needed, len(topology.allowed)):
        short = f"the CPU budget is short: a cgroup quota gives {topology.cpu_budget} CPUs' worth of time"
    elif len(topology.allowed) < needed:
        short = f"the allowed CPUs are short: {len(topology.allowed)} by affinity and cpuset"
        if len(topology.online) > len(topology.allowed):
            short += f" of {len(topology.online)} online"
    else:
        short = "the CPUs of single nodes are short"
    return (
        f"{asked}; allowed: CPUs {format_cpulist(topology.allowed)} ({have}); {short}. Ask for "
        "fewer collectors or fewer CPUs a worker, free more CPUs, or allow oversubscribe"
    )
