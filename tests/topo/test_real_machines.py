"""Every fact that an independent program found on 32 real machines, against what discovery finds.

One test a machine: each group of facts is a function that returns the two sides of its comparison.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from numa_collectors.testing.machines import archived_topology
from numa_collectors.topo import Topology

MACHINES = Path(__file__).resolve().parents[3] / "shared" / "machines"
NAMES = sorted(path.name.removesuffix(".tar.xz") for path in MACHINES.glob("*.tar.xz"))
NUM_MACHINES = 32
KINDS = {
    "cpu+memory": "normal",
    "memory-only": "memory-only",
    "cpu-only": "cpu-only",
    "no-cpu-no-memory": "empty",
    "gpu-memory": "device",
}
Facts = dict[str, Any]
Comparison = Iterator[tuple[str, Any, Any]]

pytestmark = pytest.mark.skipif(not NAMES, reason=f"no snapshots of machines in {MACHINES}")


def load(name: str) -> tuple[Topology, Facts]:
    facts = json.loads((MACHINES / f"{name}.json").read_text())
    return archived_topology(MACHINES / f"{name}.tar.xz"), facts


def groups(items: Any) -> list[tuple[int, ...]]:
    return sorted(tuple(sorted(item if isinstance(item, list) else item["cpus"])) for item in items)


def ours(items: Any) -> list[tuple[int, ...]]:
    return sorted(item.cpus for item in items)


def hugepages(found: Any) -> dict[str, int]:
    return {size: pages.total for size, pages in found.items()}


def expected_hugepages(found: Any) -> dict[str, int]:
    return {f"{pages['size'] // 1024}kB": pages["count"] for pages in found}


def nodes(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]
    yield "sysfs_has_numa", not topology.synthesized, expected["sysfs_has_numa"]
    if topology.synthesized:
        (node,), want = topology.nodes, expected["hwloc_fallback_node"]
        yield "nodes", (node.id, list(node.cpus), node.memory_bytes), (want["node"], want["cpus"], want["memory_bytes"])
        yield "hugepages", hugepages(node.hugepages), expected_hugepages(want["hugepages"])
        return
    yield "online_nodes", [node.id for node in topology.nodes], expected["online_nodes"]
    for want in expected["nodes"]:
        node = topology.node(want["node"])
        yield "nodes", node.kind, KINDS[want["kind"]]
        yield "nodes", list(node.cpus), want["cpus"]
        yield "nodes", node.memory_bytes, want["memory_bytes"] or 0
        yield "nodes", node.free_bytes + node.reclaimable_bytes <= node.memory_bytes, True
        yield "nodes", hugepages(node.hugepages), expected_hugepages(want["hugepages"])


def node_kinds(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]
    for kind, name in (
        ("cpu-only", "cpu_only_nodes"),
        ("device", "gpu_memory_nodes"),
        ("empty", "nodes_without_cpu_and_memory"),
    ):
        yield name, [node.id for node in topology.nodes if node.kind == kind], expected[name]
    memory_only = [node.id for node in topology.nodes if node.kind in ("memory-only", "device")]
    yield "memory_only_nodes", memory_only, sorted({*expected["memory_only_nodes"], *expected["gpu_memory_nodes"]})


def cpu_sets(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]
    yield "online_cpus", list(topology.online), expected["online_cpus"]
    yield "offline_cpus", list(topology.offline), expected["offline_cpus"]
    yield "allowed_cpus", list(topology.allowed), expected["allowed_cpus"]
    disallowed = sorted(set(topology.online) - set(topology.allowed))
    yield "disallowed_cpus", disallowed, expected["disallowed_cpus"]
    if not topology.synthesized:
        yield "allowed_nodes", list(topology.nodes_allowed), expected["allowed_nodes"]
        # Nodes without memory are in no memory set, allowed or not.
        hidden = [node.id for node in topology.nodes if node.memory_bytes and node.id not in topology.nodes_allowed]
        yield "disallowed_nodes", hidden, expected["disallowed_nodes"]
        yield "cpuset_limited", bool(disallowed or hidden), expected["cpuset_limited"]


def packages_and_cores(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]
    ids = {tuple(item["cpus"]): item["package"] for item in expected["packages"]}
    yield "packages", {package.cpus: package.id for package in topology.packages}, ids
    # Without core ids and siblings nobody knows the cores: each CPU counts as one.
    single = [(cpu,) for cpu in topology.online]
    yield "cores", ours(topology.cores), groups(expected["cores"]) or single
    yield "thread_sibling_groups", ours(topology.cores), groups(expected["thread_sibling_groups"]) or single
    if expected["cores"] and "packages" not in facts["do_not_test"]:
        package_of = {tuple(item["cpus"]): item["package"] for item in expected["cores"]}
        yield "cores", {core.cpus: core.package for core in topology.cores}, package_of
    yield "l3_groups", ours(topology.l3), groups(expected["l3_groups"])


def core_kinds(topology: Topology, facts: Facts) -> Comparison:
    kinds = facts["expected"]["cpu_kinds"]
    found = {cpu: core.kind for core in topology.cores for cpu in core.cpus}
    if "hybrid-cores" in facts["kinds"]:
        fastest = max(kinds, key=lambda kind: int(kind["infos"]["FrequencyMaxMHz"]))
        for kind in kinds:
            want = "performance" if kind is fastest else "efficiency"
            yield "cpu_kinds", {found[cpu] for cpu in kind["cpus"]}, {want}
    elif len({kind.get("efficiency", 0) for kind in kinds}) > 1:
        best = max(kind["efficiency"] for kind in kinds)
        for kind in kinds:
            want = "performance" if kind["efficiency"] == best else "efficiency"
            yield "cpu_kinds", {found[cpu] for cpu in kind["cpus"]}, {want}
    else:
        yield "cpu_kinds", set(found.values()), {None}


def distances(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]["distances"]
    if expected:
        for i, source in enumerate(expected["node_order"]):
            row = [topology.distance(source, target) for target in expected["node_order"]]
            yield "distances", row, expected["matrix"][i]
    elif len(topology.nodes) > 1:
        yield "distances", topology.distances, None


def pci(topology: Topology, facts: Facts) -> Comparison:
    expected = facts["expected"]["pci"]
    devices = {device.pci: device for device in topology.devices}
    # The other program cannot represent domains of more than 16 bits.
    ordinary = {address for address in devices if len(address.split(":")[0]) == 4}
    yield "pci", ordinary, {item["address"] for item in expected}
    for item in expected:
        device = devices[item["address"]]
        yield "pci", device.class_id[:6], f"0x{item['class']}"
        if item["vendor"] != "0000":
            yield "pci", (device.vendor, device.device), (f"0x{item['vendor']}", f"0x{item['device']}")
        one_node = item["local_nodes"][0] if len(item["local_nodes"]) == 1 else None
        if item.get("kernel_numa_node_agrees"):
            yield "pci", device.node, one_node
        elif item.get("kernel_numa_node_agrees") is None:
            # numa_node is -1 or absent: known only where the local CPUs are those of one node of several.
            known = len(topology.nodes) > 1 and set(item["local_cpus"]) != set(topology.online)
            yield "pci", device.node, one_node if known else None


@pytest.mark.parametrize("name", NAMES)
def test_every_fact(name: str) -> None:
    topology, facts = load(name)
    wrong = [
        f"{fact}: found {found!r}, expected {want!r}"
        for compare in (nodes, node_kinds, cpu_sets, packages_and_cores, core_kinds, distances, pci)
        for fact, found, want in compare(topology, facts)
        if fact not in facts["do_not_test"] and found != want
    ]
    assert not wrong, "\n".join(wrong)
    assert topology.problems == ()
    assert Topology.from_json(topology.to_json()) == topology


def test_all_machines_are_there() -> None:
    assert len(NAMES) == NUM_MACHINES


def test_pci_domain_of_32_bits() -> None:
    topology, _ = load("2pa-pcidomain32bits")
    assert {"10000:00:00.0", "10000:00:04.0"} <= {device.pci for device in topology.devices}


def test_gpu_memory_nodes_belong_to_their_gpus() -> None:
    topology, facts = load("nvidiagpunumanodes")
    owners = {device.memory_node: device.pci for device in topology.devices if device.memory_node is not None}
    expected = {node["node"]: node for node in facts["expected"]["nodes"] if node["kind"] == "gpu-memory"}
    assert owners == {number: node["hwloc_infos"]["PCIBusID"] for number, node in expected.items()}


@pytest.mark.parametrize(
    "name", ["2ps3-2t", "5intel64-hybrid-lakefield", "16amd64-8n2c-cpusets", "2pa-pcidomain32bits"]
)
def test_unpacked_on_disk(name: str, tmp_path: Path) -> None:
    """The other tests read archives from memory; this is the same through the file system, links and all."""
    with tarfile.open(MACHINES / f"{name}.tar.xz") as archive:
        archive.extractall(
            tmp_path, **({"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {})
        )
    topology, facts = load(name)
    if facts["synthetic_proc_self_status"]:
        status = tmp_path / name / "proc/self/status"
        status.parent.mkdir(parents=True, exist_ok=True)
        status.write_text(facts["synthetic_proc_self_status"])
    assert Topology.discover(tmp_path / name) == topology
