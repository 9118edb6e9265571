"""Dividing one host between several launchers, such as the local ranks of ``torchrun``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from numa_collectors.errors import PlacementError
from numa_collectors.placement.cores import UsableCore, cores_by_node
from numa_collectors.topo.model import Topology

__all__ = ["local_share"]


def local_share(
    topology: Topology, local_rank: int, local_world_size: int, env: Mapping[str, str] | None = None
) -> Topology:
    """Return the machine as local rank ``local_rank`` of ``local_world_size`` should see it: disjoint whole cores.

    Ranks whose GPU (visible ordinal = local rank) has a known node share that node, provided that every such node has
    usable CPUs and every node with usable CPUs gets at least one rank; otherwise the cores are cut into equal runs in
    node order. ``PlacementError`` where there are more ranks than cores.
    """
    if not 0 <= local_rank < local_world_size:
        raise PlacementError(f"expected 0 <= local_rank < local_world_size, got {local_rank} and {local_world_size}")
    if local_world_size == 1:
        return topology
    cores = cores_by_node(topology)
    every = [core for own in cores.values() for core in own]
    if len(every) < local_world_size:
        raise PlacementError(
            f"asked to share {len(every)} allowed cores between {local_world_size} local ranks, expected at least one each; "
            "start fewer ranks on this host, allow more CPUs, or set oversubscribe"
        )
    homes = _gpu_homes(topology, local_world_size, os.environ if env is None else env)
    groups = {node: [rank for rank, home in enumerate(homes) if home == node] for node in cores}
    home = homes[local_rank]
    # Decided from all homes, so that every rank decides alike.
    at_home = all(node in cores for node in homes) and all(0 < len(groups[node]) <= len(cores[node]) for node in cores)
    if home is not None and at_home:
        mine = _cut(cores[home], groups[home].index(local_rank), len(groups[home]))
    else:
        mine = _cut(every, local_rank, local_world_size)
    return topology.restricted([cpu for core in mine for cpu in core.cpus])


def _gpu_homes(topology: Topology, number: int, env: Mapping[str, str]) -> list[int | None]:
    gpus = topology.visible_gpus(env)
    return [gpus[rank].node if rank < len(gpus) else None for rank in range(number)]


def _cut(cores: Sequence[UsableCore], part: int, parts: int) -> Sequence[UsableCore]:
    return cores[len(cores) * part // parts : len(cores) * (part + 1) // parts]
