"""CPUs, cores, caches, packages, nodes and distances from sysfs.

Sources: Documentation/ABI/stable/sysfs-devices-node, Documentation/ABI/stable/sysfs-devices-system-cpu and
Documentation/admin-guide/cputopology.rst in the kernel.  Groups (cores, L3, packages) are read from one CPU of each
group and not again from its siblings, so that 2,048 CPUs cost hundreds of files rather than tens of thousands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

from numa_collectors.topo.files import Root
from numa_collectors.topo.model import Core, CoreKind, CpuGroup, Distances, HugePages, Node, NodeKind, Package

__all__ = ["read_cores", "read_cpus", "read_distances", "read_l3", "read_nodes", "read_packages", "synthesize_node"]

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_MEMINFO_KB = re.compile(r"^(?:Node \d+ )?([A-Za-z_()]+):\s+(\d+) kB", re.MULTILINE)
# Below this fraction of the fastest core's base frequency or capacity a core is an efficiency core.  Favoured cores of
# one kind differ in turbo, never in base frequency.
_EFFICIENCY_RATIO = 0.8


def read_cpus(root: Root) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the online and the offline (present, not online) CPUs; nothing where sysfs has no CPU directory."""
    directories = root.numbered(_CPU, "cpu")
    online = root.cpulist(f"{_CPU}/online")
    if online is None:
        # Kernels without cpu/online: a CPU that cannot be unplugged has no "online" file and is online.
        online = tuple(cpu for cpu in directories if root.read(f"{_CPU}/cpu{cpu}/online") != "0")
    present = root.cpulist(f"{_CPU}/present") or tuple(directories)
    return online, tuple(sorted(set(present) - set(online)))


def _group(
    online: Sequence[int], siblings: Callable[[int], Collection[int] | None]
) -> list[tuple[int, tuple[int, ...]]]:
    """Partition ``online`` by what each group's first CPU says; a CPU belongs to the first group that claims it."""
    left = set(online)
    groups = []
    for cpu in online:
        if cpu not in left:
            continue
        claimed = siblings(cpu)
        if claimed is None:
            continue
        members = (left & set(claimed)) | {cpu}
        left -= members
        groups.append((cpu, tuple(sorted(members))))
    return groups


def _topology_siblings(root: Root, cpu: int, names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the set called by the first of ``names`` that there is (today's name, then that of older kernels)."""
    files = [f"{_CPU}/cpu{cpu}/topology/{name}" for name in names]
    return root.siblings(cpu, [f"{file}_list" for file in files], files)


def read_packages(root: Root, online: Sequence[int]) -> tuple[Package, ...]:
    """Return the chips; none where the firmware neither numbers nor groups them."""

    def package_id(cpu: int) -> int | None:
        value = root.integer(f"{_CPU}/cpu{cpu}/topology/physical_package_id")
        return value if value is not None and value >= 0 else None

    def siblings(cpu: int) -> Collection[int] | None:
        return _topology_siblings(root, cpu, ("package_cpus", "core_siblings"))

    packages = [Package(package_id(first), cpus) for first, cpus in _group(online, siblings)]
    if packages:
        return tuple(packages)
    by_id: dict[int, list[int]] = {}
    for cpu in online:
        number = package_id(cpu)
        if number is not None:
            by_id.setdefault(number, []).append(cpu)
    return tuple(Package(number, tuple(cpus)) for number, cpus in sorted(by_id.items()))


def read_cores(root: Root, online: Sequence[int], packages: Sequence[Package]) -> tuple[Core, ...]:
    """Return the physical cores; a CPU whose siblings nobody names is a core of its own."""

    def siblings(cpu: int) -> Collection[int]:
        return _topology_siblings(root, cpu, ("core_cpus", "thread_siblings")) or (cpu,)

    groups = [cpus for _, cpus in _group(online, siblings)]
    kinds = _core_kinds(root, [cpus[0] for cpus in groups])
    package_of = {cpu: package.id for package in packages for cpu in package.cpus}
    return tuple(Core(cpus, kinds.get(cpus[0]), package_of.get(cpus[0])) for cpus in groups)


def _core_kinds(root: Root, first_cpus: Sequence[int]) -> Mapping[int, CoreKind]:
    """Tell performance from efficiency cores; empty where all are alike."""
    atom = root.cpulist("sys/devices/cpu_atom/cpus")
    if atom:
        efficient = set(atom)
        return {cpu: "efficiency" if cpu in efficient else "performance" for cpu in first_cpus}
    for name in ("cpu_capacity", "cpufreq/base_frequency"):
        if not first_cpus or not any(root.exists(f"{_CPU}/cpu{cpu}/{name}") for cpu in {first_cpus[0], first_cpus[-1]}):
            continue
        values = {cpu: value for cpu in first_cpus if (value := root.integer(f"{_CPU}/cpu{cpu}/{name}"))}
        threshold = _EFFICIENCY_RATIO * max(values.values(), default=0)
        if any(value < threshold for value in values.values()):
            return {cpu: "efficiency" if value < threshold else "performance" for cpu, value in values.items()}
    return {}


def read_l3(root: Root, online: Sequence[int], cores: Sequence[Core]) -> tuple[CpuGroup, ...]:
    """Return the groups of CPUs that share a level-3 cache; CPUs without one are in no group."""
    core_of = {cpu: core.cpus for core in cores for cpu in core.cpus}

    def siblings(cpu: int) -> Collection[int] | None:
        cache = f"{_CPU}/cpu{cpu}/cache"
        index = _l3_index(root, cache)
        if index is None:
            return None
        shared = root.siblings(cpu, [f"{cache}/{index}/shared_cpu_list"], [f"{cache}/{index}/shared_cpu_map"])
        # Some firmware gives an empty map: the cache is the core's own.
        return shared or core_of.get(cpu, (cpu,))

    return tuple(CpuGroup(cpus) for _, cpus in _group(online, siblings))


def _l3_index(root: Root, cache: str) -> str | None:
    level = root.read(f"{cache}/index3/level")
    if level == "3":
        return "index3"
    if level is None and not root.exists(f"{cache}/index0"):
        return None
    for name in root.names(cache):
        if name.startswith("index") and name != "index3" and root.read(f"{cache}/{name}/level") == "3":
            return name
    return None


def read_nodes(root: Root, online: Sequence[int], device_nodes: Collection[int]) -> tuple[Node, ...]:
    """Return the online nodes, also those without CPUs, without memory, or without either."""
    ids = root.numbered(_NODE, "node")
    listed = root.cpulist(f"{_NODE}/online")
    if listed:
        ids = [node for node in ids if node in set(listed)]
    online_set = frozenset(online)
    return tuple(_read_node(root, node, online_set, node in device_nodes) for node in ids)


def _read_node(root: Root, node: int, online: frozenset[int], is_device: bool) -> Node:
    directory = f"{_NODE}/node{node}"
    listed = root.cpulist(f"{directory}/cpulist")
    if listed is None:
        listed = root.cpumap(f"{directory}/cpumap") or ()
    cpus = tuple(cpu for cpu in listed if cpu in online)
    memory = _memory(root.read(f"{directory}/meminfo"))
    kind = _node_kind(bool(cpus), memory["MemTotal"] > 0, is_device)
    hugepages = _hugepages(root, f"{directory}/hugepages")
    return Node(node, kind, cpus, memory["MemTotal"], memory["MemFree"], memory["reclaimable"], hugepages)


def _node_kind(has_cpus: bool, has_memory: bool, is_device: bool) -> NodeKind:
    if has_cpus:
        return "normal" if has_memory else "cpu-only"
    if has_memory:
        return "device" if is_device else "memory-only"
    return "empty"


def _memory(text: str | None) -> dict[str, int]:
    """Return MemTotal, MemFree and what can be reclaimed, in bytes; zeros where the kernel says nothing."""
    kilobytes = {name: int(value) for name, value in _MEMINFO_KB.findall(text or "")}
    file_pages = kilobytes.get("Active(file)", 0) + kilobytes.get("Inactive(file)", 0)
    dirty = kilobytes.get("Dirty", 0) + kilobytes.get("Writeback", 0)
    reclaimable = max(0, file_pages - dirty) + kilobytes.get("SReclaimable", 0)
    return {
        "MemTotal": kilobytes.get("MemTotal", 0) * 1024,
        "MemFree": kilobytes.get("MemFree", 0) * 1024,
        "reclaimable": reclaimable * 1024,
    }


def _hugepages(root: Root, directory: str) -> dict[str, HugePages]:
    pages = {}
    for name in root.names(directory):
        if name.startswith("hugepages-"):
            total = root.integer(f"{directory}/{name}/nr_hugepages")
            free = root.integer(f"{directory}/{name}/free_hugepages")
            pages[name.removeprefix("hugepages-")] = HugePages(total or 0, free or 0)
    return pages


def synthesize_node(root: Root, online: Sequence[int]) -> Node:
    """Return the one node of a kernel without NUMA: all CPUs and the machine's memory (0 where unknown)."""
    memory = _memory(root.read("proc/meminfo"))
    hugepages = _hugepages(root, "sys/kernel/mm/hugepages")
    return Node(0, "normal", tuple(online), memory["MemTotal"], memory["MemFree"], memory["reclaimable"], hugepages)


def read_distances(root: Root, nodes: Sequence[Node]) -> Distances | None:
    """Return the distance matrix; None where any row is missing or does not have one value a node."""
    ids = tuple(node.id for node in nodes)
    matrix = []
    for node in ids:
        text = root.read(f"{_NODE}/node{node}/distance")
        if text is None:
            return None
        try:
            row = tuple(map(int, text.split()))
        except ValueError:
            row = ()
        if len(row) != len(ids):
            root.problems.append(
                f"/{_NODE}/node{node}/distance: expected {len(ids)} numbers, one an online node, got {text[:40]!r}; "
                "distances are taken as unknown"
            )
            return None
        matrix.append(row)
    return Distances(ids, tuple(matrix)) if ids else None
