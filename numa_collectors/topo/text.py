"""A topology as a text tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from numa_collectors._cpulist import format_cpulist
from numa_collectors.topo.advice import Advice
from numa_collectors.topo.model import Device, Node, Topology

__all__ = ["format_size", "render_advice", "render_tree", "summary"]

_MAX_MATRIX = 16
_MAX_L3_LINES = 16
_SHOWN_KINDS = ("gpu", "accelerator", "nic")


def format_size(count: int) -> str:
    """Return ``count`` bytes with a binary unit and three significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1000 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"


def summary(topology: Topology) -> str:
    """Return the machine in one line."""
    threads = max((len(core.cpus) for core in topology.cores), default=1)
    memory = sum(node.memory_bytes for node in topology.nodes if node.kind != "device")
    parts = [
        _count(len(topology.packages), "package") if topology.packages else "",
        _count(len(topology.nodes), "NUMA node"),
        _count(len(topology.cores), "core"),
        _count(len(topology.online), "CPU") + (f" (SMT{threads})" if threads > 1 else ""),
        format_size(memory),
    ]
    return ", ".join(part for part in parts if part)


def render_tree(topology: Topology, env: Mapping[str, str]) -> str:
    """Return the machine node by node, then what the process may use of it."""
    ordinals = {gpu.pci: ordinal for ordinal, gpu in enumerate(topology.visible_gpus(env))}
    lines = [summary(topology)]
    for node in topology.nodes:
        lines += _node_lines(topology, node, ordinals)
    unknown = [device for device in topology.devices if device.node is None and device.kind in _SHOWN_KINDS]
    if unknown:
        lines += ["node unknown", *(f"  {_device(device, ordinals)}" for device in unknown)]
    lines += ["", *_distance_lines(topology), *_limit_lines(topology)]
    return "\n".join(lines)


def render_advice(advice: Iterable[Advice]) -> str:
    """Return advice as ``! text`` with its remedy below it, notes as ``- text``."""
    lines = []
    for item in advice:
        lines.append(f"{'-' if item.is_note else '!'} {item.text}  [{item.code}]")
        if item.remedy:
            lines.append(f"    remedy: {item.remedy}")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _node_lines(topology: Topology, node: Node, ordinals: Mapping[str, int]) -> list[str]:
    own = set(node.cpus)
    cores = [core for core in topology.cores if own.intersection(core.cpus)]
    parts = [f"node {node.id}" + ("" if node.kind == "normal" else f" ({node.kind})")]
    if node.cpus:
        parts.append(f"CPUs {format_cpulist(node.cpus)} ({_count(len(cores), 'core')})")
    if node.memory_bytes:
        parts.append(f"{format_size(node.memory_bytes)}, {format_size(node.free_bytes)} free")
    reserved = [f"{pages.total} x {size} pages" for size, pages in node.hugepages.items() if pages.total]
    lines = ["  ".join([*parts, *reserved])]
    lines += [f"  {line}" for line in _l3_lines(topology, own)]
    kinds = {
        kind: [cpu for core in cores if core.kind == kind for cpu in core.cpus]
        for kind in ("performance", "efficiency")
    }
    lines += [f"  {kind} cores: CPUs {format_cpulist(cpus)}" for kind, cpus in kinds.items() if cpus]
    lines += [
        f"  {_device(device, ordinals)}"
        for device in topology.devices
        if device.node == node.id and device.kind in _SHOWN_KINDS
    ]
    lines += [f"  memory of GPU {device.pci}" for device in topology.devices if device.memory_node == node.id]
    return lines


def _l3_lines(topology: Topology, own: set[int]) -> list[str]:
    groups = [group.cpus for group in topology.l3 if own.intersection(group.cpus)]
    lines = [f"L3  CPUs {format_cpulist(cpus)}" for cpus in groups[:_MAX_L3_LINES]]
    return lines + ([f"L3  and {len(groups) - _MAX_L3_LINES} more"] if len(groups) > _MAX_L3_LINES else [])


def _device(device: Device, ordinals: Mapping[str, int]) -> str:
    pci_id = (
        f"{device.vendor.removeprefix('0x')}:{device.device.removeprefix('0x')}" if device.vendor else "unknown model"
    )
    name = device.model or pci_id
    ordinal = f"  = gpu:{ordinals[device.pci]}" if device.pci in ordinals else ""
    hidden = "  (not visible)" if device.kind == "gpu" and not device.usable else ""
    return f"{device.kind} {device.pci}  {name}{ordinal}{hidden}"


def _distance_lines(topology: Topology) -> list[str]:
    if topology.distances is None or len(topology.distances.nodes) < 2:
        return []
    nodes, matrix = topology.distances.nodes, topology.distances.matrix
    values = sorted({value for row in matrix for value in row})
    if len(nodes) > _MAX_MATRIX:
        return [f"distances: {len(nodes)} nodes, values {' '.join(map(str, values))}"]
    width = max(len(str(value)) for value in (*values, *nodes))

    def row(head: str, cells: Sequence[int]) -> str:
        return f"  {head:>{width}}  " + " ".join(f"{cell:>{width}}" for cell in cells)

    return ["distances", row("", nodes), *(row(str(node), cells) for node, cells in zip(nodes, matrix, strict=True))]


def _limit_lines(topology: Topology) -> list[str]:
    lines = []
    if topology.offline:
        lines.append(f"offline CPUs: {format_cpulist(topology.offline)}")
    narrowed = "all online" if topology.allowed == topology.online else format_cpulist(topology.allowed)
    lines.append(f"allowed CPUs: {narrowed}; memory of nodes {format_cpulist(topology.nodes_allowed)}")
    if topology.cpu_budget < len(topology.allowed):
        lines.append(f"CPU budget: {topology.cpu_budget} (quota)")
    if topology.memory_limit_bytes is not None:
        left = "" if topology.memory_headroom_bytes is None else f", {format_size(topology.memory_headroom_bytes)} left"
        lines.append(f"memory limit: {format_size(topology.memory_limit_bytes)}{left}")
    return lines
