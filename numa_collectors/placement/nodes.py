"""Which nodes workers may use, in which order, and where their memory comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numa_collectors.errors import PlacementError
from numa_collectors.placement.cores import UsableCore, num_fitting
from numa_collectors.placement.model import PlacementRequest
from numa_collectors.topo.model import Topology

__all__ = ["choose_learner_node", "memory_nodes", "nearest_first", "usable_nodes"]

_FAR = 1 << 30


def usable_nodes(
    topology: Topology, request: PlacementRequest, cores: Mapping[int, Sequence[UsableCore]]
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of nodes to try for collectors, best first: never empty, none of them empty.

    The nodes asked for are the only ones.  Otherwise those with allowed CPUs and allowed memory come first, then all with
    allowed CPUs: a core whose memory is remote is better than half a core.
    """
    if isinstance(request.numa_nodes, tuple):
        return (tuple(dict.fromkeys(request.numa_nodes)),)
    with_memory = set(topology.nodes_allowed)
    both = tuple(node.id for node in topology.numa_nodes if node.id in cores and node.id in with_memory)
    return (both, tuple(cores)) if both and len(both) < len(cores) else (tuple(cores),)


def nearest_first(topology: Topology, origin: int, nodes: Sequence[int]) -> tuple[int, ...]:
    """Return ``nodes`` by distance from ``origin``, itself first; by id where distances are equal or unknown."""

    def key(node: int) -> tuple[bool, int, int]:
        distance = topology.distance(origin, node)
        return (node != origin, _FAR if distance is None else distance, node)

    return tuple(sorted(nodes, key=key))


def memory_nodes(topology: Topology, node_id: int) -> tuple[int, ...] | None:
    """Return where a worker on ``node_id`` takes its memory: its own node, else the nearest with host memory.

    None where all host memory is on one node.  Device memory is never host memory; a memory-only node (CXL, HBM) is
    taken only where no node with CPUs has memory to give at the same distance.
    """
    host = {node.id: node.kind for node in topology.nodes if node.kind in ("normal", "memory-only")}
    kinds = {node: host[node] for node in topology.nodes_allowed if node in host}
    if len(host) < 2 or not kinds:
        return None
    if node_id in kinds:
        return (node_id,)
    ranked = nearest_first(topology, node_id, tuple(kinds))
    nearest = topology.distance(node_id, ranked[0])
    equals = [node for node in ranked if topology.distance(node_id, node) == nearest]
    return (min(equals, key=lambda node: (kinds[node] != "normal", node)),)


def choose_learner_node(
    topology: Topology,
    request: PlacementRequest,
    cores: Mapping[int, Sequence[UsableCore]],
    env: Mapping[str, str],
) -> tuple[int, tuple[str, ...]]:
    """Return the learner's node and why: the one asked for, its GPU's, or else the one with most room."""
    if request.learner_node is not None:
        return request.learner_node, (f"the learner is on node {request.learner_node} as asked",)
    reasons = []
    if request.learner_gpu is not None:
        node, reason = _gpu_node(topology, request.learner_gpu, env)
        if node is not None:
            nearest = nearest_first(topology, node, tuple(cores))[0]
            if nearest != node:
                reason += f"; no allowed CPU is there, node {nearest} is the nearest that has one"
            return nearest, (reason,)
        reasons.append(reason)
    candidates = usable_nodes(topology, request, cores)[0]
    node = _roomiest(request, cores, candidates)
    reasons.append(f"the learner is on node {node}, which has the most cores to spare")
    return node, tuple(reasons)


def _gpu_node(topology: Topology, ordinal: int, env: Mapping[str, str]) -> tuple[int | None, str]:
    visible = topology.visible_gpus(env)
    if not visible and not any(device.kind == "gpu" for device in topology.devices):
        return None, f"no GPU is listed in sysfs, so the node of GPU {ordinal} is unknown"
    if not 0 <= ordinal < len(visible):
        listed = ", ".join(gpu.pci for gpu in visible) or "none"
        raise PlacementError(
            f"asked for GPU {ordinal}, visible GPUs are {listed} (numbered from 0): choose one of them, or check "
            "CUDA_VISIBLE_DEVICES / HIP_VISIBLE_DEVICES / ROCR_VISIBLE_DEVICES"
        )
    gpu = visible[ordinal]
    if gpu.node is None:
        return None, f"the kernel does not know the node of GPU {ordinal} ({gpu.pci})"
    return gpu.node, f"GPU {ordinal} ({gpu.pci}) is on node {gpu.node}, so the learner is too"


def _roomiest(request: PlacementRequest, cores: Mapping[int, Sequence[UsableCore]], candidates: Sequence[int]) -> int:
    """Return the node that keeps most cores once its collectors have theirs; the first of equals."""
    asked = request.numa_nodes
    if not isinstance(asked, tuple):
        return max(candidates, key=lambda node: (len(cores[node]), -node))
    ranks = [asked[rank % len(asked)] for rank in range(request.num_collectors)]

    def spare(node: int) -> int:
        fitting = num_fitting(cores[node], request.cpus_per_collector) or 1
        return len(cores[node]) - ranks.count(node) * len(cores[node]) // fitting

    # Next to the collectors where two cores can be spared there, else wherever there is most room.
    near = [node for node in candidates if spare(node) >= 2]
    return near[0] if near else max(cores, key=lambda node: (spare(node), -node))
