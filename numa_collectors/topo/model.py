"""What a machine is: the frozen description that everything else reads.

Nothing here touches the machine; :mod:`numa_collectors.topo.discover` does.  All tuples of ids are sorted and
distinct. CPU ids are the kernel's (what ``taskset`` takes), node ids are the kernel's (what ``numactl`` takes); both
may have gaps.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = [
    "Core",
    "CpuGroup",
    "Device",
    "Distances",
    "HugePages",
    "Node",
    "NodeKind",
    "Package",
    "Topology",
]

NodeKind = Literal["normal", "cpu-only", "memory-only", "device", "empty"]
CoreKind = Literal["performance", "efficiency"]


@dataclass(frozen=True, slots=True)
class HugePages:
    """Reserved huge pages of one size on one node, in pages."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node.

    ``cpus`` are online.  ``reclaimable_bytes`` is page cache that the kernel can give up (clean file pages and
    reclaimable slab).  ``hugepages`` is keyed as sysfs writes it (``"2048kB"``).
    """

    id: int
    kind: NodeKind
    cpus: tuple[int, ...]
    memory_bytes: int = 0
    free_bytes: int = 0
    reclaimable_bytes: int = 0
    hugepages: Mapping[str, HugePages] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core: its online SMT siblings.  ``kind`` is None where all cores are alike or nobody says."""

    cpus: tuple[int, ...]
    kind: CoreKind | None = None
    package: int | None = None


@dataclass(frozen=True, slots=True)
class CpuGroup:
    """CPUs that share a cache."""

    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Package:
    """One chip.  ``id`` is the firmware's number, which need not be small, or None where the firmware gives none."""

    id: int | None
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """A PCI device; ``pci`` is its address (``0000:3b:00.0``, the domain may have more than four digits).

    ``node`` is None where the kernel does not know it: -1 in sysfs is unknown, never node 0.  ``uuid``, ``minor`` and
    ``memory_node`` (the NUMA node that the device's own memory is) are known for GPUs whose driver says so.
    """

    pci: str
    class_id: str
    vendor: str
    device: str
    kind: str
    node: int | None = None
    uuid: str | None = None
    minor: int | None = None
    model: str | None = None
    memory_node: int | None = None
    usable: bool = True


@dataclass(frozen=True, slots=True)
class Distances:
    """ACPI SLIT distances: ``matrix[i][j]`` from ``nodes[i]`` to ``nodes[j]``, 10 is local; may be asymmetric."""

    nodes: tuple[int, ...]
    matrix: tuple[tuple[int, ...], ...]

    def index(self, node: int) -> int | None:
        """Return the row of ``node``, or None where it has none."""
        at = bisect_left(self.nodes, node)
        return at if at < len(self.nodes) and self.nodes[at] == node else None


@dataclass(frozen=True, slots=True)
class Topology:
    """A machine as the calling process may use it.

    ``allowed`` is what the process may run on (affinity, cpuset and ``Cpus_allowed`` together), ``nodes_allowed`` the
    nodes whose memory it may use.  ``cpu_budget`` is how many CPUs' worth of time it can get: the number of allowed
    CPUs, or the smallest cgroup quota if that is less, never under 1.  ``memory_limit_bytes`` and
    ``memory_headroom_bytes`` are the tightest cgroup memory limit and what is left of it.  ``isolated`` are CPUs that
    the scheduler does not balance. ``problems`` are the things that could not be read, in words.  ``synthesized``
    says that the kernel has no NUMA directory, so that one node was made of everything.
    """

    nodes: tuple[Node, ...]
    distances: Distances | None
    online: tuple[int, ...]
    offline: tuple[int, ...]
    allowed: tuple[int, ...]
    nodes_allowed: tuple[int, ...]
    cpu_budget: int
    packages: tuple[Package, ...]
    cores: tuple[Core, ...]
    l3: tuple[CpuGroup, ...]
    devices: tuple[Device, ...]
    kernel: Mapping[str, object]
    synthesized: bool = False
    isolated: tuple[int, ...] = ()
    memory_limit_bytes: int | None = None
    memory_headroom_bytes: int | None = None
    problems: tuple[str, ...] = ()

    @classmethod
    def discover(cls, root: str | os.PathLike[str] = "/") -> Topology:
        """Read the machine below ``root`` (a directory that holds ``sys`` and ``proc``).

        Reads files only: no device is opened and no driver started.  With ``root="/"`` the calling thread's affinity
        narrows ``allowed`` too.  What cannot be read is left out and named in ``problems``; ``TopologyError`` is
        raised only where not even the online CPUs can be found.
        """
        from numa_collectors.topo.discover import discover

        return discover(root)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Rebuild a topology from :meth:`to_json`; ``TopologyError`` where the text is something else."""
        from numa_collectors.topo.serial import topology_from_json

        return topology_from_json(text)

    def to_json(self) -> str:
        """Return the description as JSON, schema ``numa-collectors/topology/1``."""
        from numa_collectors.topo.serial import topology_to_json

        return topology_to_json(self)

    def node(self, node_id: int) -> Node:
        """Return the node of that id; ``TopologyError`` names the ones that exist."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        from numa_collectors._cpulist import format_cpulist
        from numa_collectors.errors import TopologyError

        known = format_cpulist(node.id for node in self.nodes)
        raise TopologyError(f"expected one of the nodes {known}, got {node_id}: no such NUMA node is online here")

    def node_of_cpu(self, cpu: int) -> int | None:
        """Return the id of the node that holds ``cpu`` (the lowest, should several claim it), or None."""
        for node in self.nodes:
            if cpu in node.cpus:
                return node.id
        return None

    def distance(self, source: int, target: int) -> int | None:
        """Return the distance from node ``source`` to node ``target``, or None where the kernel gives none."""
        if self.distances is None:
            return None
        row, column = self.distances.index(source), self.distances.index(target)
        return None if row is None or column is None else self.distances.matrix[row][column]

    @property
    def numa_nodes(self) -> tuple[Node, ...]:
        """Nodes that have both CPUs and memory."""
        return tuple(node for node in self.nodes if node.kind == "normal")

    @property
    def is_numa(self) -> bool:
        """Whether placement can matter: more than one node has CPUs and memory."""
        return len(self.numa_nodes) > 1

    def visible_gpus(self, env: Mapping[str, str] | None = None) -> tuple[Device, ...]:
        """Return the GPUs in the order in which a CUDA or HIP program started with ``env`` numbers them.

        ``env`` defaults to ``os.environ``.  See :mod:`numa_collectors.topo.gpus` for the rules.
        """
        from numa_collectors.topo.gpus import visible_gpus

        return visible_gpus(self, os.environ if env is None else env)

    def to_svg(self, placement: object = None) -> str:
        """Return a picture of the machine, and of who sits where when a ``Placement`` is given."""
        from numa_collectors.topo.svg import render_svg

        return render_svg(self, placement)

    def restricted(self, cpus: Sequence[int]) -> Topology:
        """Return the same machine with ``allowed`` narrowed to ``cpus`` (several launchers that share a host)."""
        allowed = tuple(sorted(set(self.allowed) & set(cpus)))
        return replace(self, allowed=allowed, cpu_budget=max(1, min(self.cpu_budget, len(allowed))))
