"""JSON in and out, schema ``numa-collectors/topology/1``: fields may be added to it and are never renamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from numa_collectors.errors import TopologyError
from numa_collectors.topo.model import Core, CpuGroup, Device, Distances, HugePages, Node, Package, Topology

__all__ = ["SCHEMA", "topology_from_json", "topology_to_dict", "topology_to_json"]

SCHEMA = "numa-collectors/topology/1"

T = TypeVar("T")


def topology_to_dict(topology: Topology) -> dict[str, Any]:
    """Return the description as plain dicts and lists."""
    distances = topology.distances
    return {
        "schema": SCHEMA,
        "synthesized": topology.synthesized,
        "nodes": [_node_to_dict(node) for node in topology.nodes],
        "distances": None
        if distances is None
        else {"nodes": list(distances.nodes), "matrix": [list(row) for row in distances.matrix]},
        "cpus": {
            "online": list(topology.online),
            "offline": list(topology.offline),
            "allowed": list(topology.allowed),
            "isolated": list(topology.isolated),
        },
        "nodes_allowed": list(topology.nodes_allowed),
        "cpu_budget": topology.cpu_budget,
        "memory_limit_bytes": topology.memory_limit_bytes,
        "memory_headroom_bytes": topology.memory_headroom_bytes,
        "packages": [{"id": package.id, "cpus": list(package.cpus)} for package in topology.packages],
        "cores": [{"cpus": list(core.cpus), "kind": core.kind, "package": core.package} for core in topology.cores],
        "l3": [{"cpus": list(group.cpus)} for group in topology.l3],
        "devices": [_device_to_dict(device) for device in topology.devices],
        "kernel": dict(topology.kernel),
        "problems": list(topology.problems),
    }


def topology_to_json(topology: Topology) -> str:
    """Return the description as JSON text, one top-level field a line."""
    fields = topology_to_dict(topology).items()
    return "{\n" + ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in fields) + "\n}\n"


def topology_from_json(text: str) -> Topology:
    """Rebuild a topology; ``TopologyError`` says what is not as the schema has it."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise TopologyError(f"expected a topology as JSON (schema {SCHEMA}), got no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise TopologyError(
            f"expected a topology of schema {SCHEMA!r}, got {got!r}; make a new dump with "
            "'python -m numa_collectors.topo --dump FILE' and this version of the library"
        )
    try:
        return _build(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TopologyError(f"the topology is not as schema {SCHEMA} has it: {type(error).__name__}: {error}") from None


def _build(data: Mapping[str, Any]) -> Topology:
    cpus = data["cpus"]
    distances = data["distances"]
    return Topology(
        nodes=_each(data["nodes"], _node_from_dict),
        distances=None
        if distances is None
        else Distances(_ids(distances["nodes"]), tuple(tuple(map(int, row)) for row in distances["matrix"])),
        online=_ids(cpus["online"]),
        offline=_ids(cpus["offline"]),
        allowed=_ids(cpus["allowed"]),
        nodes_allowed=_ids(data["nodes_allowed"]),
        cpu_budget=int(data["cpu_budget"]),
        packages=_each(data["packages"], lambda item: Package(item["id"], _ids(item["cpus"]))),
        cores=_each(data["cores"], lambda item: Core(_ids(item["cpus"]), item.get("kind"), item.get("package"))),
        l3=_each(data["l3"], lambda item: CpuGroup(_ids(item["cpus"]))),
        devices=_each(data["devices"], _device_from_dict),
        kernel=dict(data["kernel"]),
        synthesized=bool(data["synthesized"]),
        isolated=_ids(cpus.get("isolated", ())),
        memory_limit_bytes=data.get("memory_limit_bytes"),
        memory_headroom_bytes=data.get("memory_headroom_bytes"),
        problems=tuple(map(str, data.get("problems", ()))),
    )


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(map(int, values))


def _each(items: Any, build: Callable[[Any], T]) -> tuple[T, ...]:
    return tuple(build(item) for item in items)


def _node_to_dict(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "kind": node.kind,
        "cpus": list(node.cpus),
        "memory_bytes": node.memory_bytes,
        "free_bytes": node.free_bytes,
        "reclaimable_bytes": node.reclaimable_bytes,
        "hugepages": {size: {"total": pages.total, "free": pages.free} for size, pages in node.hugepages.items()},
    }


def _node_from_dict(item: Mapping[str, Any]) -> Node:
    kind = item["kind"]
    if kind not in ("normal", "cpu-only", "memory-only", "device", "empty"):
        raise ValueError(f"node kind {kind!r}")
    hugepages = {str(size): HugePages(int(p["total"]), int(p["free"])) for size, p in item["hugepages"].items()}
    return Node(
        int(item["id"]),
        kind,
        _ids(item["cpus"]),
        int(item["memory_bytes"]),
        int(item["free_bytes"]),
        int(item.get("reclaimable_bytes", 0)),
        hugepages,
    )


def _device_to_dict(device: Device) -> dict[str, Any]:
    return {
        "pci": device.pci,
        "class": device.class_id,
        "vendor": device.vendor,
        "device": device.device,
        "kind": device.kind,
        "node": device.node,
        "uuid": device.uuid,
        "minor": device.minor,
        "model": device.model,
        "memory_node": device.memory_node,
        "usable": device.usable,
    }


def _device_from_dict(item: Mapping[str, Any]) -> Device:
    return Device(
        str(item["pci"]),
        str(item["class"]),
        str(item["vendor"]),
        str(item["device"]),
        str(item["kind"]),
        item["node"],
        item.get("uuid"),
        item.get("minor"),
        item.get("model"),
        item.get("memory_node"),
        bool(item.get("usable", True)),
    )
