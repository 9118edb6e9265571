"""``Topology.discover`` and ``plan`` on kernels that really have these nodes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from guest_support import (
    CGROUPS,
    MACHINES,
    cpuset,
    in_child,
    join,
    node_memory_kib,
    write_kernel_file,
)

from numa_collectors._cpulist import parse_cpulist
from numa_collectors.errors import PlacementError, TopologyError
from numa_collectors.placement import PlacementRequest, plan
from numa_collectors.topo import Topology

CPU_DIRECTORY = Path("/sys/devices/system/cpu")


@pytest.mark.guest(*MACHINES)
def test_nodes_cpus_memory_and_distances(topology_name: str) -> None:
    facts = MACHINES[topology_name]
    found = Topology.discover()
    ids = parse_cpulist(facts.online)
    with_cpu, with_memory = set(parse_cpulist(facts.has_cpu)), set(parse_cpulist(facts.has_memory))
    assert tuple(node.id for node in found.nodes) == ids
    for node, cpulist, row in zip(found.nodes, facts.cpulists, facts.distances, strict=True):
        assert node.cpus == parse_cpulist(cpulist)
        assert node.memory_bytes == node_memory_kib(node.id) * 1024
        assert tuple(found.distance(node.id, other) for other in ids) == tuple(int(text) for text in row.split())
        expected = (
            "normal" if node.id in with_cpu & with_memory else "cpu-only" if node.id in with_cpu else "memory-only"
        )
        assert node.kind == expected
    assert found.nodes_allowed == tuple(sorted(with_memory))
    assert found.is_numa == (len(with_cpu & with_memory) > 1)
    assert not found.synthesized
    assert found.problems == ()
    assert found.allowed == found.online == tuple(sorted(os.sched_getaffinity(0)))
    assert found.cpu_budget == len(found.online)


@pytest.mark.guest("4n", "sparse", "memonly", "pci")
def test_json_carries_the_machine_elsewhere() -> None:
    found = Topology.discover()
    assert Topology.from_json(found.to_json()) == found


@pytest.mark.guest("sparse")
def test_a_hole_in_the_node_ids() -> None:
    found = Topology.discover()
    assert found.distance(0, 1) is None
    assert found.node_of_cpu(found.node(2).cpus[0]) == 2
    with pytest.raises(TopologyError, match="0,2"):
        found.node(1)


@pytest.mark.guest("smt")
def test_siblings_make_cores() -> None:
    found = Topology.discover()
    assert [core.cpus for core in found.cores] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [package.cpus for package in found.packages] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    placement = plan(found, PlacementRequest(num_collectors=2, learner_cpus=0))
    assert [worker.cpus for worker in placement.collectors] == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.guest("pci")
def test_devices_say_their_node_and_unknown_is_none() -> None:
    found = Topology.discover()
    assert [device.node for device in found.devices if device.kind == "nic"] == [1]
    assert [device.node for device in found.devices if device.class_id.startswith("0x03")] == [1]
    bridge = next(device for device in found.devices if device.pci == "0000:00:00.0")
    assert bridge.node is None
    assert {node.id: node.cpus for node in found.nodes} == {0: (0, 2), 1: (1, 3)}


def _discover_inside(group: Path) -> object:
    join(group)
    return json.loads(Topology.discover().to_json())


@pytest.mark.guest("2n")
def test_inside_a_cpuset_the_hidden_node_is_not_allowed() -> None:
    with cpuset(cpus="0-1", mems="0") as group:
        inside = in_child(_discover_inside, group)
    assert [node["id"] for node in inside["nodes"]] == [0, 1]
    assert inside["nodes_allowed"] == [0]
    assert inside["cpus"]["allowed"] == [0, 1]
    assert inside["cpu_budget"] == 2


@pytest.mark.guest("2n")
def test_a_quota_and_a_memory_limit_of_a_cgroup_count() -> None:
    write_kernel_file(CGROUPS / "cgroup.subtree_control", "+cpu +memory")
    with cpuset(name="quota") as group:
        write_kernel_file(group / "cpu.max", "250000 100000")
        write_kernel_file(group / "memory.max", str(256 << 20))
        inside = in_child(_discover_inside, group)
    assert inside["cpu_budget"] == 2
    assert inside["memory_limit_bytes"] == 256 << 20
    assert inside["cpus"]["allowed"] == [0, 1, 2, 3]


@pytest.mark.guest("2n")
def test_an_offline_cpu_leaves_its_node() -> None:
    switch = CPU_DIRECTORY / "cpu3" / "online"
    write_kernel_file(switch, "0")
    try:
        found = Topology.discover()
    finally:
        write_kernel_file(switch, "1")
    assert found.offline == (3,)
    assert found.node(1).cpus == (2,)
    assert found.allowed == (0, 1, 2)
    assert Topology.discover().node(1).cpus == (2, 3)


@pytest.mark.guest("2n")
def test_a_node_whose_cpus_are_all_offline_is_memory_only() -> None:
    for cpu in (2, 3):
        write_kernel_file(CPU_DIRECTORY / f"cpu{cpu}" / "online", "0")
    try:
        found = Topology.discover()
    finally:
        for cpu in (2, 3):
            write_kernel_file(CPU_DIRECTORY / f"cpu{cpu}" / "online", "1")
    assert found.node(1).kind == "memory-only"
    assert not found.is_numa
    with pytest.raises(PlacementError):
        plan(found, PlacementRequest(num_collectors=2, numa_nodes=(1,)))


@pytest.mark.guest("2n")
def test_huge_pages_are_counted_a_node() -> None:
    pool = Path("/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages")
    write_kernel_file(pool, "4")
    try:
        nodes = Topology.discover().nodes
    finally:
        write_kernel_file(pool, "0")
    assert [node.hugepages["2048kB"].total for node in nodes] == [0, 4]


@pytest.mark.guest("2n", "4n", "8n", "pci", "sparse", "memonly", "memless")
def test_a_plan_keeps_each_collector_on_one_usable_node() -> None:
    found = Topology.discover()
    usable = [node.id for node in found.nodes if node.cpus]
    placement = plan(found, PlacementRequest(num_collectors=len(usable), learner_cpus=0))
    taken: list[int] = []
    for worker in placement.collectors:
        assert worker.cpus
        assert {found.node_of_cpu(cpu) for cpu in worker.cpus} == {worker.node}
        for node in worker.memory_nodes or ():
            assert found.node(node).memory_bytes > 0
        taken += worker.cpus
    assert len(taken) == len(set(taken))


@pytest.mark.guest("memonly", "memless", "sparse")
def test_asking_for_a_node_that_cannot_hold_a_worker(topology_name: str) -> None:
    found = Topology.discover()
    unusable = {"memonly": 2, "sparse": 1}.get(topology_name)
    if unusable is None:  # a CPU-only node takes workers, with the nearest memory
        worker = plan(found, PlacementRequest(numa_nodes=(1,))).collectors[0]
        assert worker.cpus is not None
        assert set(worker.cpus) <= set(found.node(1).cpus)
        assert worker.memory_nodes in (None, (0,))
    else:
        with pytest.raises(PlacementError):
            plan(found, PlacementRequest(numa_nodes=(unusable,)))
