"""Putting a :class:`Topology` together from the files below a root."""

from __future__ import annotations

import os

from numa_collectors._cpulist import format_cpulist
from numa_collectors.errors import TopologyError
from numa_collectors.topo.cgroups import Limits, read_limits
from numa_collectors.topo.devices import DriverGpu, read_devices, read_kfd_gpus, read_nvidia_gpus
from numa_collectors.topo.files import Root
from numa_collectors.topo.model import Node, Topology
from numa_collectors.topo.sysfs import (
    read_cores,
    read_cpus,
    read_distances,
    read_l3,
    read_nodes,
    read_packages,
    synthesize_node,
)

__all__ = ["discover", "discover_root"]


def discover(path: str | os.PathLike[str] = "/") -> Topology:
    """Read the machine below ``path``; see :meth:`Topology.discover`."""
    return discover_root(Root(path))


def discover_root(root: Root) -> Topology:
    """Read the machine that ``root`` stands for, wherever its files really are."""
    limits = read_limits(root)
    online, offline = _cpus(root, limits)
    nvidia = read_nvidia_gpus(root)
    nodes, synthesized = _nodes(root, online, nvidia)
    packages = read_packages(root, online)
    cores = read_cores(root, online, packages)
    allowed = _allowed(root, online, limits)
    node_ids = {node.id for node in nodes}
    return Topology(
        nodes=nodes,
        distances=None if synthesized else read_distances(root, nodes),
        online=online,
        offline=offline,
        allowed=allowed,
        nodes_allowed=tuple(sorted(node_ids if limits.nodes is None else node_ids & set(limits.nodes))),
        cpu_budget=_budget(allowed, limits),
        packages=packages,
        cores=cores,
        l3=read_l3(root, online, cores),
        devices=read_devices(root, nodes, nvidia, read_kfd_gpus(root)),
        kernel=_kernel(root, limits),
        synthesized=synthesized,
        isolated=tuple(cpu for cpu in root.cpulist("sys/devices/system/cpu/isolated") or () if cpu in set(online)),
        memory_limit_bytes=limits.memory_limit_bytes,
        memory_headroom_bytes=limits.memory_headroom_bytes,
        problems=tuple(dict.fromkeys(root.problems)),
    )


def _cpus(root: Root, limits: Limits) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return online and offline CPUs, from the affinity or a bare count where sysfs is masked or absent."""
    online, offline = read_cpus(root)
    if online:
        return online, offline
    if limits.cpus:
        root.problems.append("/sys/devices/system/cpu is not readable: the CPUs are those of /proc/self/status")
        return limits.cpus, ()
    if root.is_live:
        return _affinity() or tuple(range(os.cpu_count() or 1)), ()
    raise TopologyError(
        f"expected {root.path!r} to hold sys/devices/system/cpu or proc/self/status, found neither; "
        "give the directory that stands for / (the parent of sys)"
    )


def _nodes(root: Root, online: tuple[int, ...], nvidia: dict[str, DriverGpu]) -> tuple[tuple[Node, ...], bool]:
    device_nodes = {gpu.memory_node for gpu in nvidia.values() if gpu.memory_node is not None}
    nodes = read_nodes(root, online, device_nodes)
    if any(node.cpus for node in nodes):
        return nodes, False
    if nodes:
        root.problems.append("no NUMA node names an online CPU: all CPUs are taken as one node")
    return (synthesize_node(root, online),), True


def _affinity() -> tuple[int, ...] | None:
    """Return the calling thread's CPUs, or None on systems without affinity."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return None


def _allowed(root: Root, online: tuple[int, ...], limits: Limits) -> tuple[int, ...]:
    allowed = set(online)
    if limits.cpus is not None:
        allowed &= set(limits.cpus)
    affinity = _affinity() if root.is_live else None
    if affinity is not None:
        allowed &= set(affinity)
    if not allowed:
        root.problems.append(
            f"none of the CPUs that the process was given ({format_cpulist(limits.cpus or ())}) is online: "
            "all online CPUs are taken as allowed"
        )
        allowed = set(online)
    return tuple(sorted(allowed))


def _budget(allowed: tuple[int, ...], limits: Limits) -> int:
    quota = len(allowed) if limits.quota_cpus is None else int(limits.quota_cpus)
    return max(1, min(len(allowed), quota))


def _kernel(root: Root, limits: Limits) -> dict[str, object]:
    """Return the kernel's settings that matter to placement; what is absent is left out."""
    facts: dict[str, object] = {}
    release = root.read("proc/sys/kernel/osrelease")
    if release:
        facts["release"] = release
    balancing = root.integer("proc/sys/kernel/numa_balancing")
    if balancing is not None:
        facts["numa_balancing"] = balancing
    for name, file in (("thp", "enabled"), ("thp_shmem", "shmem_enabled")):
        text = root.read(f"sys/kernel/mm/transparent_hugepage/{file}")
        if text and "[" in text:
            facts[name] = text.partition("[")[2].partition("]")[0]
    smt = root.read("sys/devices/system/cpu/smt/control")
    if smt:
        facts["smt"] = smt
    if limits.version is not None:
        facts["cgroup"] = limits.version
    if limits.quota_cpus is not None:
        facts["quota_cpus"] = round(limits.quota_cpus, 3)
    return facts
