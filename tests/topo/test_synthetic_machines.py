"""What discovery makes of machines that defeat launchers: one test a peculiarity, all machines through the common checks."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from numa_collectors.errors import TopologyError
from numa_collectors.testing.machines import MACHINES, topology_of
from numa_collectors.topo import Topology

NOBODY = 65534


def kinds(topology: Topology) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in topology.nodes:
        found.setdefault(node.kind, []).append(node.id)
    return found


def test_names_agree() -> None:
    assert [make().name for make in MACHINES.values()] == list(MACHINES)
    assert len(MACHINES) >= 20


@pytest.mark.parametrize("name", MACHINES)
def test_description_is_consistent(name: str) -> None:
    topology = topology_of(name)
    online = set(topology.online)
    assert online
    assert set(topology.allowed) <= online
    assert topology.allowed
    assert not online & set(topology.offline)
    assert sorted(cpu for core in topology.cores for cpu in core.cpus) == list(topology.online)
    assert {cpu for node in topology.nodes for cpu in node.cpus} == online
    assert set(topology.nodes_allowed) <= {node.id for node in topology.nodes}
    assert 1 <= topology.cpu_budget <= len(topology.allowed)
    assert Topology.from_json(topology.to_json()) == topology
    assert topology.problems == () or name in ("masked-container", "distances-truncated", "unreadable", "vanishing")


def test_epyc_nps() -> None:
    assert [len(topology_of(f"epyc-{mode}").nodes) for mode in ("nps1", "nps2", "nps4-8gpu", "l3-as-numa")] == [
        2,
        4,
        8,
        16,
    ]
    nps4 = topology_of("epyc-nps4-8gpu")
    assert (len(nps4.online), len(nps4.cores), len(nps4.l3), len(nps4.packages)) == (256, 128, 16, 2)
    assert nps4.node(5).cpus == (*range(80, 96), *range(208, 224))
    assert nps4.l3[0].cpus == (*range(8), *range(128, 136))
    assert nps4.distance(0, 3) == 12
    assert nps4.distance(0, 4) == 32
    assert [gpu.node for gpu in nps4.visible_gpus({})] == [3, 2, 1, 0, 7, 6, 5, 4]
    assert sum(device.kind == "nic" for device in nps4.devices) == 8
    l3 = topology_of("epyc-l3-as-numa")
    assert [node.cpus for node in l3.nodes] == [group.cpus for group in l3.l3]


def test_sub_numa_clusters() -> None:
    assert len(topology_of("xeon-snc2").numa_nodes) == 4
    snc4 = topology_of("xeon-snc4")
    assert len(snc4.numa_nodes) == 8
    assert len(snc4.packages) == 2


def test_hbm_flat() -> None:
    topology = topology_of("xeon-max-hbm-flat")
    assert kinds(topology) == {"normal": list(range(8)), "memory-only": list(range(8, 16))}
    assert topology.distance(0, 8) == 13


def test_gpu_memory_nodes() -> None:
    gb200 = topology_of("gb200")
    assert len(gb200.nodes) == 34
    assert kinds(gb200)["normal"] == [0, 1]
    assert kinds(gb200)["device"] == [2, 10, 18, 26]
    assert len(kinds(gb200)["empty"]) == 28
    assert [(gpu.node, gpu.memory_node) for gpu in gb200.visible_gpus({})] == [(0, 2), (0, 10), (1, 18), (1, 26)]
    assert kinds(topology_of("gh200"))["device"] == [1]
    assert not topology_of("gh200").is_numa


def test_memory_only_and_cpu_only() -> None:
    assert kinds(topology_of("cxl-expander")) == {"normal": [0, 1], "memory-only": [2]}
    assert kinds(topology_of("threadripper-2990wx")) == {"normal": [0, 2], "cpu-only": [1, 3]}


def test_large() -> None:
    assert len(topology_of("cpus-2048").online) == 2048
    many = topology_of("nodes-1024")
    assert len(many.nodes) == 1024
    assert many.node_of_cpu(1023) == 1023
    assert many.distance(1023, 0) == 40


def test_sparse_ids() -> None:
    topology = topology_of("sparse-ids")
    assert [node.id for node in topology.nodes] == [0, 8, 256, 1000]
    assert topology.distance(256, 1000) == 20
    assert topology.is_numa


def test_smt() -> None:
    nosmt = topology_of("nosmt")
    assert nosmt.online == tuple(range(16))
    assert nosmt.offline == tuple(range(16, 32))
    assert nosmt.kernel["smt"] == "forceoff"
    power = topology_of("power-smt8")
    assert power.cores[1].cpus == tuple(range(8, 16))
    assert [node.id for node in power.nodes] == [0, 8]


def test_isolated_and_removed() -> None:
    isolated = topology_of("isolcpus")
    assert isolated.isolated == (4, 5, 6, 7)
    assert isolated.allowed == tuple(range(6))
    removed = topology_of("hot-removed")
    assert removed.online == (0, 1, 2, 4, 6, 7, 8, 10, 11)
    assert removed.offline == (5,)
    assert removed.node(1).cpus == (6, 7, 8, 10, 11)


def test_core_kinds() -> None:
    arm = {core.cpus[0]: core.kind for core in topology_of("arm-big-little").cores}
    assert [arm[0], arm[3], arm[4], arm[7]] == ["efficiency", "efficiency", "performance", "performance"]
    intel = topology_of("intel-hybrid")
    assert [core.kind for core in intel.cores] == ["performance"] * 8 + ["efficiency"] * 8


def test_cgroup_limits() -> None:
    nested = topology_of("cgroup2-nested")
    assert nested.allowed == (*range(6), *range(16, 22))
    assert nested.nodes_allowed == (0,)
    assert nested.cpu_budget == 6
    assert (nested.memory_limit_bytes, nested.memory_headroom_bytes) == (96 << 30, 80 << 30)
    first = topology_of("cgroup1-limits")
    assert first.allowed == (*range(8, 16), *range(24, 32))
    assert first.nodes_allowed == (1,)
    assert first.cpu_budget == 4
    assert first.memory_headroom_bytes == 30 << 30


def test_masked_and_without_nodes() -> None:
    masked = topology_of("masked-container")
    assert masked.online == (0, 1, 2, 3, 8, 9, 10, 11)
    assert masked.synthesized
    assert masked.nodes[0].memory_bytes == 32 << 30
    assert len(masked.problems) == 1
    plain = topology_of("no-node-directory")
    assert plain.synthesized
    assert len(plain.nodes) == 1
    assert len(plain.nodes[0].cpus) == 32
    assert plain.distances is None


def test_distances_that_are_not_there() -> None:
    assert topology_of("distances-missing").distances is None
    truncated = topology_of("distances-truncated")
    assert truncated.distances is None
    assert "expected 2 numbers" in truncated.problems[0]


def test_nul_bytes_change_nothing() -> None:
    nul, plain = topology_of("nul-bytes"), topology_of("distances-missing")
    assert nul.nodes == plain.nodes
    assert nul.cores == plain.cores
    assert nul.l3 == plain.l3


def test_vanishing_entries() -> None:
    topology = topology_of("vanishing")
    assert [node.id for node in topology.nodes] == [0, 1]
    assert len(topology.online) == 32
    assert [device.class_id for device in topology.devices] == [""]


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="needs POSIX users")
def test_unreadable_files_as_nobody() -> None:
    """Files that may not be read are named; what the others say still stands."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        root = MACHINES["unreadable"]().write(Path(directory) / "root")
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(NOBODY)
            topology = Topology.discover(root)
        finally:
            os.seteuid(user)
    assert topology == topology_of("unreadable")
    assert topology.distances is None
    assert topology.node(1).kind == "cpu-only"
    assert topology.node(1).cpus == (*range(8, 16), *range(24, 32))
    assert {problem.split(":")[0].rpartition("/")[2] for problem in topology.problems} == {
        "meminfo", "distance", "core_cpus_list",
    }  # fmt: skip
    assert all("Permission denied" in problem for problem in topology.problems)


def test_a_root_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="give the directory that stands for /"):
        Topology.discover(tmp_path)
    with pytest.raises(TopologyError):
        Topology.discover(tmp_path / "absent")


def test_unknown_node_is_named() -> None:
    with pytest.raises(TopologyError, match=r"nodes 0,8,256,1000, got 5"):
        topology_of("sparse-ids").node(5)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"schema": "numa-collectors/topology/2"}', '{"schema": "numa-collectors/topology/1"}', "\0"],
)
def test_json_that_is_no_topology(text: str) -> None:
    with pytest.raises(TopologyError, match="numa-collectors/topology/1"):
        Topology.from_json(text)


def test_contradictions_in_a_dump_are_refused() -> None:
    text = topology_of("one-cpu").to_json()
    for good, bad in (('"kind": "normal"', '"kind": "odd"'), ('"cpu_budget": 1', '"cpu_budget": "x"')):
        assert good in text
        with pytest.raises(TopologyError):
            Topology.from_json(text.replace(good, bad))


@pytest.mark.parametrize(
    "name", ["sparse-ids", "cgroup2-nested", "cgroup1-limits", "vanishing", "hot-removed", "nul-bytes"]
)
def test_written_to_disk(name: str, tmp_path: Path) -> None:
    """The other tests read machines from memory; this is the same through the file system."""
    assert Topology.discover(MACHINES[name]().write(tmp_path)) == topology_of(name)


def test_this_machine() -> None:
    topology = Topology.discover()
    assert set(topology.allowed) <= os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) <= set(topology.online)
    assert sum(node.memory_bytes for node in topology.nodes) > 0
    assert len(topology.online) == os.cpu_count()
