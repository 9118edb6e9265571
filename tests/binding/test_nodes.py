"""What a node can give, on written trees and on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from numa_collectors import _nodes, binding
from numa_collectors.errors import BindingError, NodeCapacityError

MIB = 1 << 20
GIB = 1 << 30

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def node_meminfo(node: int, total_kib: int, free_kib: int, file_kib: int = 0, slab_kib: int = 0) -> str:
    return (
        f"\0Node {node} MemTotal:       {total_kib} kB\nNode {node} MemFree:        {free_kib} kB\n"
        f"Node {node} Active(file):   {file_kib} kB\nNode {node} Inactive(file):        0 kB\n"
        f"Node {node} SReclaimable:   {slab_kib} kB\nNode {node} HugePages_Total:     3\n"
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Nodes 0, 2 (cpu-only) and 4 (memory-only); the cpuset allows 0 alone; 512 MiB on node 0."""
    base = "sys/devices/system/node"
    write(tmp_path, f"{base}/online", "0,2,4\n")
    write(tmp_path, f"{base}/has_memory", "0,4\n")
    for node, cpus in ((0, "0-1"), (2, "2-3"), (4, "")):
        write(tmp_path, f"{base}/node{node}/cpulist", f"{cpus}\n")
    write(tmp_path, f"{base}/node0/meminfo", node_meminfo(0, 512 * 1024, 300 * 1024, 100 * 1024, 10 * 1024))
    write(tmp_path, f"{base}/node4/meminfo", node_meminfo(4, 2048 * 1024, 2000 * 1024))
    write(tmp_path, "proc/self/status", "Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t0\n")
    for cpu, node in ((0, 0), (1, 0), (2, 2), (3, 2)):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)
    write(tmp_path, "sys/devices/system/cpu/online", "0-3\n")
    return tmp_path


def test_facts(tree: Path) -> None:
    assert _nodes.online_nodes(tree) == (0, 2, 4)
    assert _nodes.memory_nodes(tree) == (0, 4)
    assert _nodes.allowed_nodes(tree) == (0,)
    assert _nodes.node_cpus(2, tree) == (2, 3)
    assert _nodes.node_cpus(4, tree) == _nodes.node_cpus(9, tree) == ()
    assert _nodes.nodes_of_cpus((1, 2), tree) == (0, 2)
    assert _nodes.online_cpus(tree) == (0, 1, 2, 3)
    assert _nodes.described(tree)


def test_machine_without_node_folder(tmp_path: Path) -> None:
    assert not _nodes.described(tmp_path)
    assert _nodes.online_nodes(tmp_path) == _nodes.memory_nodes(tmp_path) == (0,)
    assert _nodes.allowed_nodes(tmp_path) is None
    assert _nodes.node_headroom_bytes(0, tmp_path) is None
    _nodes.check_nodes((0,), tmp_path)
    _nodes.check_room("ring", 1 << 50, ("node 0", None), _nodes.cgroup_place(tmp_path))
    write(tmp_path, "proc/meminfo", "MemTotal: 104857600 kB\nMemFree: 52428800 kB\n")
    assert _nodes.node_headroom_bytes(0, tmp_path) == 49 * GIB


@pytest.mark.parametrize(
    ("node", "code", "words"),
    [
        (1, "node-missing", r"online NUMA node \(0,2,4\), got 1"),
        (5000, "node-missing", "got 5000"),
        (2, "node-without-memory", r"with memory \(0,4\), got 2"),
        (4, "node-not-allowed", r"allocate from \(0\), got 4; widen cpuset.mems"),
    ],
)
def test_each_impossible_node_has_its_own_code(tree: Path, node: int, code: str, words: str) -> None:
    with pytest.raises(BindingError, match=words) as caught:
        _nodes.check_nodes((0, node), tree)
    assert caught.value.code == code


def test_headroom_counts_half_of_the_page_cache_and_leaves_the_watermarks(tree: Path) -> None:
    assert _nodes.node_headroom_bytes(0, tree) == (300 + (100 + 10) // 2 - 64) * MIB
    # Only what the cpuset allows counts for the process as a whole.
    assert _nodes.node_headroom_bytes(None, tree) == _nodes.node_headroom_bytes(0, tree)
    assert _nodes.node_headroom_bytes(7, tree) is None


def test_room(tree: Path) -> None:
    have = ("node 0", _nodes.node_headroom_bytes(0, tree))
    _nodes.check_room("ring", 291 * MIB, have)
    with pytest.raises(NodeCapacityError, match="ring needs 700 MiB, but node 0 has 291 MiB left"):
        _nodes.check_room("ring", 700 * MIB, have)


def cgroup_v2(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/app\n")
    for path, limit, usage in (("", "max", 0), ("/pod", 1024 * MIB, 900 * MIB), ("/pod/app", 800 * MIB, 100 * MIB)):
        write(root, f"sys/fs/cgroup{path}/memory.max", f"{limit}\n")
        write(root, f"sys/fs/cgroup{path}/memory.current", f"{usage}\n")
        write(root, f"sys/fs/cgroup{path}/memory.stat", f"anon 5\ninactive_file {20 * MIB}\nactive_file {4 * MIB}\n")


def test_tightest_cgroup_limit_on_the_way_up_counts(tree: Path) -> None:
    assert _nodes.cgroup_headroom_bytes(tree) is None
    cgroup_v2(tree)
    assert _nodes.cgroup_headroom_bytes(tree) == (1024 - 900 + 24) * MIB
    with pytest.raises(NodeCapacityError, match="the cgroup's memory limit has 148 MiB left"):
        _nodes.check_room("ring", 149 * MIB, ("node 0", GIB), _nodes.cgroup_place(tree))


def test_cgroup_v1_and_namespaces(tree: Path) -> None:
    write(tree, "proc/self/cgroup", "5:cpu,memory:/../..\n2:freezer:/x\n")
    write(tree, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{300 * MIB}\n")
    write(tree, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{100 * MIB}\n")
    assert _nodes.cgroup_headroom_bytes(tree) == 200 * MIB
    # v1's "no limit" is the largest page-aligned number.
    write(tree, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert _nodes.cgroup_headroom_bytes(tree) is None


@linux
def test_capacity_of_this_machine() -> None:
    binding.check_capacity(None, 0, 1 << 20)
    binding.check_capacity(None, None, 1 << 20)
    with pytest.raises(NodeCapacityError, match=r"3 rings needs .* but node 0 has"):
        binding.check_capacity(None, 0, 1 << 50, what="3 rings")


def test_bytes_in_words() -> None:
    assert _nodes.format_bytes(700 * MIB) == "700 MiB"
    assert _nodes.format_bytes(64 * GIB) == "64.0 GiB"
