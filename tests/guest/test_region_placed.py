"""Regions on several nodes: every page on the planned node, whoever touches it, whatever the filter, and room first."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import pytest
from guest_support import (
    MPOL_BIND,
    PAGE_BYTES,
    cpuset,
    get_mempolicy,
    node_memory_kib,
    page_nodes,
    run_python,
    set_mempolicy,
)

from numa_collectors import binding
from numa_collectors._nodes import node_cpus
from numa_collectors.errors import BindingError, NodeCapacityError
from numa_collectors.shm import Region

MIB = 1 << 20
DEADLINE_S = 120.0


def nodes_of(region: Region) -> Counter[int]:
    """The oracle: pages by node, asked with the lab's own calls."""
    return Counter(page_nodes(region.address, region.size_bytes // PAGE_BYTES))


@pytest.mark.guest("2n", "2n-arm", "smt", "pci")
@pytest.mark.parametrize("policy", ["bind", "preferred"])
def test_every_page_is_on_the_planned_node(policy: Any) -> None:
    for node in (0, 1):
        with Region.create(f"ring[{node}]", 4 * MIB, node=node, policy=policy) as region:
            assert nodes_of(region) == {node: 1024}
            assert (region.report.verified, region.report.method) == (True, "mbind")
            assert dict(region.report.pages_per_node) == {node: 1024}


@pytest.mark.guest("4n", "8n")
def test_every_page_on_each_of_many_nodes(topology_name: str) -> None:
    for node in range(int(topology_name[0])):
        with Region.create("ring", MIB, node=node) as region:
            assert nodes_of(region) == {node: 256}


@pytest.mark.guest("memonly")
def test_memory_only_node_takes_a_region() -> None:
    with Region.create("ring", 4 * MIB, node=2) as region:
        assert nodes_of(region) == {2: 1024}
        assert region.report.verified


@pytest.mark.guest("memless")
def test_cpu_only_node_takes_none() -> None:
    with pytest.raises(BindingError, match="with memory") as caught:
        Region.create("ring", MIB, node=1)
    assert caught.value.code == "node-without-memory"


@pytest.mark.guest("sparse")
def test_hole_in_the_node_ids() -> None:
    with Region.create("ring", MIB, node=2) as region:
        assert nodes_of(region) == {2: 256}
    with pytest.raises(BindingError, match="got 1"):
        Region.create("ring", MIB, node=1)


def _other_side(region: Region, pipe: Connection) -> None:
    """Live on node 0 in every way, and use every page of a region that belongs on node 1."""
    os.sched_setaffinity(0, {0, 1})
    set_mempolicy(MPOL_BIND, [0])
    region.buf[::PAGE_BYTES] = b"\1" * (region.size_bytes // PAGE_BYTES)
    pipe.send((dict(nodes_of(region)), region.verify().verified, get_mempolicy()))
    region.close()
    pipe.close()


@pytest.mark.guest("2n", "2n-arm")
def test_the_other_side_lives_elsewhere_and_a_third_process_reopens() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with Region.create("ring[0]", 4 * MIB, node=1) as region:
        process = context.Process(target=_other_side, args=(region, theirs))
        process.start()
        theirs.close()
        assert ours.poll(DEADLINE_S)
        pages, verified, policy = ours.recv()
        process.join(DEADLINE_S)
        assert (pages, verified) == ({1: 1024}, True)
        assert policy == (MPOL_BIND, [0])
        assert nodes_of(region) == {1: 1024}
        third = run_python(f"""
import json, os
from guest_support import MPOL_BIND, page_nodes, set_mempolicy
from numa_collectors.shm import Region
os.sched_setaffinity(0, {{0}})
set_mempolicy(MPOL_BIND, [0])
descriptor = os.open("/proc/{os.getpid()}/fd/{region.fileno()}", os.O_RDWR)
with Region.attach(descriptor, node=1) as region:
    report = region.verify()
    print(json.dumps([sorted(set(page_nodes(region.address, 1024))), report.verified, report.pages_total]))
""")
        assert third == [[1], True, 1024]
    ours.close()


@pytest.mark.guest("2n")
def test_the_makers_own_policy_and_cpu_do_not_matter() -> None:
    found = run_python("""
import json, os
from guest_support import MPOL_BIND, page_nodes, set_mempolicy, get_mempolicy
from numa_collectors.shm import Region
os.sched_setaffinity(0, {0})
set_mempolicy(MPOL_BIND, [0])
with Region.create("snapshot", 2 << 20, node=1) as region:
    print(json.dumps([sorted(set(page_nodes(region.address, 512))), region.report.verified, get_mempolicy()[1],
                      sorted(os.sched_getaffinity(0))]))
""")
    assert found == [[1], True, [0], [0]]


@pytest.mark.guest("2n")
def test_a_region_away_from_its_plan_is_not_verified() -> None:
    with Region.create("ring", MIB, node=0) as region:
        other = Region.attach(os.dup(region.fileno()), node=1)
        with other:
            report = other.verify()
            assert (report.verified, dict(report.pages_per_node), report.local_fraction) == (False, {0: 256}, 0.0)
            assert "256 on node 0" in str(report.reason)


REFUSED = """
import json, os
from guest_support import refuse_policy_calls
from numa_collectors.shm import Region
mask = os.sched_getaffinity(0)
refuse_policy_calls({error})
found = []
for node, cpus in ((0, None), (1, None), (1, (3,)), (1, (0,))):
    with Region.create("ring", 4 << 20, node=node, toucher_cpus=cpus) as region:
        report = region.report
        found.append([report.method, report.verified, report.evidence, dict(report.pages_per_node)])
assert os.sched_getaffinity(0) == mask
print(json.dumps(found))
"""


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_container_filter_leaves_rings_local_by_pinned_first_touch(error: int) -> None:
    found = run_python(REFUSED.format(error=error))
    assert found == [
        ["first-touch", True, "numa_maps", {"0": 1024}],
        ["first-touch", True, "numa_maps", {"1": 1024}],
        ["first-touch", True, "numa_maps", {"1": 1024}],
        # Touched from the wrong side on request: seen, not believed.
        ["first-touch", False, "numa_maps", {"0": 1024}],
    ]


@pytest.mark.guest("memonly")
def test_container_filter_and_a_node_without_cpus() -> None:
    found = run_python("""
import errno, json
from guest_support import refuse_policy_calls
from numa_collectors.shm import Region
refuse_policy_calls(errno.EPERM)
with Region.create("ring", 1 << 20, node=2) as region:
    print(json.dumps([region.report.method, region.report.verified, region.report.reason]))
""")
    assert found[:2] == ["none", False]
    assert "those of node 2" in found[2]


@pytest.mark.guest("2n")
def test_cpuset_that_hides_the_node() -> None:
    with cpuset(cpus="0-3", mems="0") as group:
        found = run_python(f"""
import json
from pathlib import Path
from guest_support import join
from numa_collectors.errors import BindingError
from numa_collectors.shm import Region
join(Path({str(group)!r}))
try:
    Region.create("ring", 1 << 20, node=1)
except BindingError as error:
    print(json.dumps([error.code, str(error)]))
""")
    assert found[0] == "node-not-allowed"
    assert "cpuset.mems" in found[1]


@pytest.mark.guest("small")
def test_700_mib_of_a_512_mib_node() -> None:
    assert node_memory_kib(1) < 512 * 1024
    for _ in range(2):
        with pytest.raises(NodeCapacityError, match="region 'ring' needs 700 MiB, but node 1 has") as caught:
            Region.create("ring", 700 * MIB, node=1, policy="bind")
        assert isinstance(caught.value, MemoryError)
    with pytest.raises(NodeCapacityError, match="the plan needs 700 MiB"):
        binding.check_capacity(None, 1, 700 * MIB)
    from numa_collectors.topo import Topology

    with pytest.raises(NodeCapacityError, match="node 1 has"):
        binding.check_capacity(Topology.discover(), 1, 700 * MIB)
    binding.check_capacity(Topology.discover(), 0, 700 * MIB)
    with Region.create("ring", 700 * MIB, node=1, policy="preferred") as region:
        report = region.report
        assert set(nodes_of(region)) == {0, 1}
    assert not report.verified
    assert set(report.pages_per_node) == {0, 1}
    assert sum(report.pages_per_node.values()) == 700 * MIB // PAGE_BYTES
    assert "pages away from node 1" in str(report.reason)


@pytest.mark.guest("small")
def test_a_region_as_large_as_the_check_allows_is_made_and_nobody_is_killed() -> None:
    from numa_collectors._nodes import node_headroom_bytes

    room = node_headroom_bytes(1)
    assert room is not None
    with Region.create("ring", room - MIB, node=1) as region:
        assert set(nodes_of(region)) == {1}
        with pytest.raises(NodeCapacityError, match="node 1"):
            Region.create("second", 64 * MIB, node=1)


@pytest.mark.guest("2n")
def test_huge_pages_on_a_node() -> None:
    from pathlib import Path

    from guest_support import write_kernel_file

    switch = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    write_kernel_file(switch, "advise")
    try:
        with Region.create("ring", 8 * MIB, node=1, huge_pages=True) as region:
            assert region.report.verified
            assert set(nodes_of(region)) == {1}
            assert region.report.huge_page_bytes > 0 or "huge page" in str(region.report.reason)
    finally:
        write_kernel_file(switch, "never")


@pytest.mark.guest("2n")
def test_pinned_toucher_without_a_policy() -> None:
    with Region.create("ring", MIB, node=1, policy="none", toucher_cpus=node_cpus(1)) as region:
        assert nodes_of(region) == {1: 256}
        assert (region.report.method, region.report.verified) == ("first-touch", True)
