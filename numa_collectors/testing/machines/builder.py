"""Describing a machine in a few calls and writing it as the files that a kernel would show.

Formats follow Documentation/ABI/stable/sysfs-devices-node, sysfs-devices-system-cpu, sysfs-bus-pci and proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from numa_collectors._cpulist import format_cpulist

__all__ = ["Builder", "Machine"]

GIB = 1 << 30
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"


@dataclass(frozen=True)
class Machine:
    """Files by path below the root; ``denied`` files get mode 0, ``dangling`` names lead nowhere, as if just unplugged."""

    name: str
    files: Mapping[str, str]
    denied: tuple[str, ...] = ()
    dangling: tuple[str, ...] = ()

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Write the root into ``directory``, which is made where it is absent, and return it."""
        root = Path(directory)
        root.mkdir(parents=True, exist_ok=True)
        made: set[str] = set()
        for path, text in self.files.items():
            parent, _, _ = path.rpartition("/")
            if parent not in made:
                (root / parent).mkdir(parents=True, exist_ok=True)
                made.add(parent)
            with open(root / path, "w", encoding="ascii", newline="") as file:
                file.write(text)
        for path in self.denied:
            (root / path).chmod(0)
        for path in self.dangling:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to("/nonexistent/unplugged")
        return root


@dataclass
class Builder:
    """Collects cores and nodes; :meth:`build` turns them into files.

    CPU ids are given out as Linux does on x86: first threads of all cores first, then second threads
    (``ids="striped"``), or all threads of a core in a row (``ids="blocked"``, as on POWER).
    """

    name: str
    threads: int = 1
    ids: str = "striped"
    files: dict[str, str] = field(default_factory=dict)
    cores: list[tuple[int, ...]] = field(default_factory=list)
    core_package: list[int] = field(default_factory=list)
    core_l3: list[int | None] = field(default_factory=list)
    node_cores: dict[int, list[int]] = field(default_factory=dict)
    node_memory: dict[int, int] = field(default_factory=dict)
    offline: tuple[int, ...] = ()
    unplugged: tuple[int, ...] = ()

    def node(
        self, node: int, *, cores: int = 0, memory_gib: float = 0, package: int = 0, cores_per_l3: int | None = 8
    ) -> Builder:
        """Add a node with ``cores`` further cores; 0 cores is memory only, 0 memory CPUs only."""
        own = []
        for index in range(cores):
            own.append(len(self.core_package))
            self.core_package.append(package)
            self.core_l3.append(None if cores_per_l3 is None else node * 1000 + index // cores_per_l3)
        self.node_cores[node] = own
        self.node_memory[node] = int(memory_gib * GIB)
        return self

    def number(self) -> Builder:
        """Give out CPU ids; call it once all nodes are there."""
        total = len(self.core_package)
        if self.ids == "striped":
            self.cores = [tuple(core + total * thread for thread in range(self.threads)) for core in range(total)]
        else:
            self.cores = [
                tuple(core * self.threads + thread for thread in range(self.threads)) for core in range(total)
            ]
        return self

    def distances(self, matrix: Sequence[Sequence[int]] | None = None, *, local: int = 10, remote: int = 21) -> Builder:
        """Write the distance files: ``matrix`` in node order, or ``remote`` between all."""
        nodes = sorted(self.node_cores)
        for i, node in enumerate(nodes):
            row = matrix[i] if matrix else [local if node == other else remote for other in nodes]
            self.files[f"{_NODE}/node{node}/distance"] = " ".join(map(str, row)) + "\n"
        return self

    def status(self, cpus: Iterable[int], nodes: Iterable[int]) -> Builder:
        """Write the masks of the process."""
        self.files["proc/self/status"] = (
            f"Name:\tpython\nCpus_allowed_list:\t{format_cpulist(cpus)}\nMems_allowed_list:\t{format_cpulist(nodes)}\n"
        )
        return self

    def device(self, pci: str, class_id: str, vendor: str, device: str, node: int | None) -> Builder:
        """Add a PCI device; a node of None is written as -1."""
        for name, text in (
            ("class", class_id),
            ("vendor", vendor),
            ("device", device),
            ("numa_node", str(-1 if node is None else node)),
        ):
            self.files[f"{_PCI}/{pci}/{name}"] = text + "\n"
        return self

    def nvidia(self, pci: str, node: int | None, minor: int, uuid: str, *, memory_node: int = -1) -> Builder:
        """Add an NVIDIA GPU with what its driver says of it."""
        self.device(pci, "0x030200", "0x10de", "0x2335", node)
        directory = f"proc/driver/nvidia/gpus/{pci}"
        self.files[f"{directory}/information"] = (
            f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 80\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        )
        self.files[f"{directory}/numa_status"] = f"Node:      {memory_node}\nStatus:    online\n"
        return self

    def build(self, *, denied: tuple[str, ...] = (), dangling: tuple[str, ...] = (), nodes: bool = True) -> Machine:
        """Return the machine; without ``nodes`` the kernel shows no NUMA directory."""
        if not self.cores:
            self.number()
        present = [cpu for core in self.cores for cpu in core if cpu not in self.unplugged]
        online = [cpu for cpu in sorted(present) if cpu not in self.offline]
        files = {
            f"{_CPU}/online": format_cpulist(online) + "\n",
            f"{_CPU}/present": format_cpulist(present) + "\n",
            f"{_CPU}/possible": format_cpulist(cpu for core in self.cores for cpu in core) + "\n",
        }
        self._cpu_files(files, set(online))
        memory = sum(self.node_memory.values())
        files["proc/meminfo"] = f"MemTotal: {memory // 1024} kB\nMemFree: {memory // 2048} kB\n"
        if nodes:
            self._node_files(files, set(present))
        distance_files = self.files if nodes else {k: v for k, v in self.files.items() if not k.startswith(_NODE)}
        return Machine(self.name, files | distance_files, denied, dangling)

    def _cpu_files(self, files: dict[str, str], online: set[int]) -> None:
        packages: dict[int, list[int]] = {}
        caches: dict[int, list[int]] = {}
        for index, core in enumerate(self.cores):
            packages.setdefault(self.core_package[index], []).extend(online & set(core))
            group = self.core_l3[index]
            if group is not None:
                caches.setdefault(group, []).extend(online & set(core))
        package_text = {package: format_cpulist(cpus) + "\n" for package, cpus in packages.items()}
        cache_text = {group: format_cpulist(cpus) + "\n" for group, cpus in caches.items()}
        for index, core in enumerate(self.cores):
            siblings = format_cpulist(online & set(core)) + "\n"
            for cpu in online & set(core):
                directory = f"{_CPU}/cpu{cpu}"
                files[f"{directory}/topology/physical_package_id"] = f"{self.core_package[index]}\n"
                files[f"{directory}/topology/package_cpus_list"] = package_text[self.core_package[index]]
                files[f"{directory}/topology/core_cpus_list"] = siblings
                group = self.core_l3[index]
                if group is not None:
                    files[f"{directory}/cache/index3/level"] = "3\n"
                    files[f"{directory}/cache/index3/shared_cpu_list"] = cache_text[group]
        for cpu in self.offline:
            files[f"{_CPU}/cpu{cpu}/online"] = "0\n"

    def _node_files(self, files: dict[str, str], present: set[int]) -> None:
        files[f"{_NODE}/online"] = format_cpulist(self.node_cores) + "\n"
        for node, cores in self.node_cores.items():
            directory = f"{_NODE}/node{node}"
            cpus = [cpu for core in cores for cpu in self.cores[core] if cpu in present]
            kilobytes = self.node_memory[node] // 1024
            files[f"{directory}/cpulist"] = format_cpulist(cpus) + "\n"
            files[f"{directory}/meminfo"] = (
                f"Node {node} MemTotal:       {kilobytes} kB\nNode {node} MemFree:        {kilobytes // 2} kB\n"
                f"Node {node} Active(file):   {kilobytes // 8} kB\nNode {node} Inactive(file): {kilobytes // 8} kB\n"
            )
