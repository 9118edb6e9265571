"""The machines that the lab can boot, and the QEMU arguments that make them.

Facts that the arguments rest on:

* A node without a memory backend is CPU-only, one without CPUs memory-only.
* QEMU shows SMT siblings only with an Intel vendor string (the default AMD one needs ``topoext``, which software
  emulation lacks).
* x86 renumbers a node that has neither CPUs nor memory, so a hole in the node ids is made by giving the middle node a
  socket that is absent; with a hole in the APIC ids the guest boots only in physical APIC mode (``possible_cpus`` above
  8).
* Sockets equal nodes, else the kernel warns that a last-level cache spans nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["TOPOLOGIES", "GuestNode", "GuestTopology", "topology_args"]


@dataclass(frozen=True)
class GuestNode:
    """One NUMA node of a guest: ``cpus`` are QEMU ``cpus=`` ranges, ``memory_mib`` 0 means no memory."""

    cpus: tuple[str, ...] = ()
    memory_mib: int = 512


@dataclass(frozen=True)
class GuestTopology:
    """A named guest; ``smp`` is QEMU's ``-smp``, ``distances`` are symmetric, keyed by (smaller, larger) node."""

    name: str
    summary: str
    smp: str
    nodes: tuple[GuestNode, ...]
    distances: Mapping[tuple[int, int], int] = field(default_factory=dict)
    cpu: str = "max"
    arch: str = "x86_64"
    devices: tuple[str, ...] = ()
    cmdline: str = ""
    num_shards: int = 1  # guests that share the topology's tests, where one would take much longer than all others

    @property
    def memory_mib(self) -> int:
        return sum(node.memory_mib for node in self.nodes)


def _line_distances(num_nodes: int, step: int) -> dict[tuple[int, int], int]:
    """Distances of nodes on a line: 10 to oneself, ``10 + step`` to the neighbour, ``10 + 2 * step`` two away, ..."""
    return {(a, b): 10 + step * (b - a) for a in range(num_nodes) for b in range(a + 1, num_nodes)}


def _two_packages(num_nodes: int, near: int, far: int) -> dict[tuple[int, int], int]:
    """Sub-NUMA clustering: ``near`` within a half of the nodes, ``far`` between the halves."""
    half = num_nodes // 2
    pairs = [(a, b) for a in range(num_nodes) for b in range(a + 1, num_nodes)]
    return {(a, b): near if a // half == b // half else far for a, b in pairs}


_PCI_ON_NODE_1 = (
    "pxb-pcie,id=pxb1,bus_nr=64,bus=pcie.0,numa_node=1",
    "pcie-root-port,id=port1,bus=pxb1,chassis=1,slot=1",
    "bochs-display,id=gpu1,bus=port1",
    "pcie-root-port,id=port2,bus=pxb1,chassis=2,slot=2",
    "e1000e,id=nic1,bus=port2,romfile=",
)

_ALL = (
    GuestTopology(
        "2n",
        "2 nodes of 2 CPUs and 512 MB",
        "4,sockets=2,cores=2",
        (GuestNode(("0-1",)), GuestNode(("2-3",))),
        {(0, 1): 21},
        num_shards=2,
    ),
    GuestTopology(
        "4n",
        "4 nodes in 2 packages: 12 within a package, 32 between",
        "4,sockets=4,cores=1",
        tuple(GuestNode((str(node),), 256) for node in range(4)),
        _two_packages(4, 12, 32),
    ),
    GuestTopology(
        "8n",
        "8 nodes of 1 CPU on a line: distances 12, 14, ... 24",
        "8,sockets=8,cores=1",
        tuple(GuestNode((str(node),), 192) for node in range(8)),
        _line_distances(8, 2),
    ),
    GuestTopology(
        "memonly",
        "node 2 has memory and no CPUs",
        "4,sockets=2,cores=2",
        (GuestNode(("0-1",)), GuestNode(("2-3",)), GuestNode((), 256)),
        {(0, 1): 21, (0, 2): 17, (1, 2): 28},
    ),
    GuestTopology(
        "memless",
        "node 1 has CPUs and no memory",
        "4,sockets=2,cores=2",
        (GuestNode(("0-1",), 768), GuestNode(("2-3",), 0)),
        {(0, 1): 21},
    ),
    GuestTopology(
        "smt",
        "2 nodes of 2 cores with 2 SMT siblings each",
        "8,sockets=2,cores=2,threads=2",
        (GuestNode(("0-3",)), GuestNode(("4-7",))),
        {(0, 1): 21},
        cpu="max,vendor=GenuineIntel",
    ),
    GuestTopology(
        "small",
        "node 1 has 512 MB, node 0 has 1,536 MB",
        "4,sockets=2,cores=2",
        (GuestNode(("0-1",), 1536), GuestNode(("2-3",), 512)),
        {(0, 1): 21},
    ),
    GuestTopology(
        "pci",
        "a display and a network device on node 1; CPUs alternate between the nodes",
        "4,sockets=4,cores=1",
        (GuestNode(("0", "2")), GuestNode(("1", "3"))),
        {(0, 1): 21},
        devices=_PCI_ON_NODE_1,
    ),
    GuestTopology(
        "sparse",
        "node ids 0 and 2, CPU ids with absent ones between",
        "2,sockets=3,cores=2,maxcpus=6",
        (GuestNode(("0-1",)), GuestNode(("2-3",), 0), GuestNode(("4-5",))),
        {(0, 1): 21, (0, 2): 31, (1, 2): 21},
        devices=(
            "max-x86_64-cpu,socket-id=2,core-id=0,thread-id=0",
            "max-x86_64-cpu,socket-id=2,core-id=1,thread-id=0",
        ),
        cmdline="possible_cpus=12",
    ),
    GuestTopology(
        "2n-arm",
        "aarch64: 2 nodes of 2 CPUs and 512 MB",
        "4,sockets=2,cores=2",
        (GuestNode(("0-1",)), GuestNode(("2-3",))),
        {(0, 1): 21},
        cpu="cortex-a72",
        arch="aarch64",
    ),
)

TOPOLOGIES: Mapping[str, GuestTopology] = {topology.name: topology for topology in _ALL}


def topology_args(topology: GuestTopology) -> list[str]:
    """The QEMU arguments for CPUs, memory, nodes, distances and devices."""
    args = ["-cpu", topology.cpu, "-smp", topology.smp, "-m", f"{topology.memory_mib}M"]
    for index, node in enumerate(topology.nodes):
        option = ["node", f"nodeid={index}", *(f"cpus={cpus}" for cpus in node.cpus)]
        if node.memory_mib:
            args += ["-object", f"memory-backend-ram,id=ram{index},size={node.memory_mib}M"]
            option.append(f"memdev=ram{index}")
        args += ["-numa", ",".join(option)]
    for (a, b), value in topology.distances.items():
        args += ["-numa", f"dist,src={a},dst={b},val={value}"]
    for device in topology.devices:
        args += ["-device", device]
    return args
