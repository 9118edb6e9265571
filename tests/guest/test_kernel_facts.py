"""Facts of the kernel that the library rests on, asked by raw system calls: a kernel that differs shows here first."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from guest_support import (
    MACHINES,
    MPOL_BIND,
    MPOL_DEFAULT,
    MPOL_F_MEMS_ALLOWED,
    MPOL_MF_MOVE,
    NODES,
    anonymous_mappings,
    cpuset,
    get_mempolicy,
    in_child,
    join,
    mapping,
    mbind,
    node_file,
    node_memory_kib,
    page_nodes,
    refuse_policy_calls,
    refused,
    run_python,
    send_own_state,
    set_mempolicy,
    touch,
    write_kernel_file,
)


@pytest.fixture
def own_policy() -> Iterator[None]:
    """Give the thread its policy and affinity back."""
    affinity = os.sched_getaffinity(0)
    yield
    set_mempolicy(MPOL_DEFAULT)
    os.sched_setaffinity(0, affinity)


@pytest.mark.guest(*MACHINES)
def test_the_guest_is_the_machine_that_was_asked_for(topology_name: str) -> None:
    facts = MACHINES[topology_name]
    ids = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    assert (NODES / "online").read_text().strip() == facts.online
    assert (NODES / "has_cpu").read_text().strip() == facts.has_cpu
    assert (NODES / "has_memory").read_text().strip() == facts.has_memory
    assert [node_file(node, "cpulist") for node in ids] == list(facts.cpulists)
    assert [" ".join(node_file(node, "distance").split()) for node in ids] == list(facts.distances)


@pytest.mark.guest("smt")
def test_smt_siblings_show() -> None:
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text().strip()
    assert siblings == "0-1"


@pytest.mark.guest("pci")
def test_devices_on_node_1_say_so() -> None:
    nodes = {path.name: (path / "numa_node").read_text().strip() for path in Path("/sys/bus/pci/devices").iterdir()}
    classes = {path.name: (path / "class").read_text().strip() for path in Path("/sys/bus/pci/devices").iterdir()}
    displays = [nodes[name] for name in nodes if classes[name].startswith("0x03")]
    networks = [nodes[name] for name in nodes if classes[name].startswith("0x02")]
    assert displays == ["1"]
    assert networks == ["1"]
    assert "-1" in nodes.values(), "devices of the root bus have no node"


@pytest.mark.guest(*MACHINES)
@pytest.mark.usefixtures("own_policy")
def test_each_node_with_memory_takes_a_policy_and_pages() -> None:
    for node in [int(path.name[4:]) for path in NODES.glob("node[0-9]*")]:
        if node_memory_kib(node) == 0:
            assert refused(set_mempolicy, MPOL_BIND, [node]) == errno.EINVAL
            continue
        set_mempolicy(MPOL_BIND, [node])
        assert get_mempolicy() == (MPOL_BIND, [node])
        with mapping(16) as (memory, address):
            touch(memory)
            assert page_nodes(address, 16) == [node] * 16
        set_mempolicy(MPOL_DEFAULT)


@pytest.mark.guest("2n", "2n-arm", "sparse", "memless")
@pytest.mark.usefixtures("own_policy")
def test_nodes_that_cannot_be_used(topology_name: str) -> None:
    # The mask may not name a node above the kernel's own limit: 16 nodes on Debian's aarch64, 1,024 on x86-64.
    for nodes in ([5], [1] if topology_name in ("sparse", "memless") else [9]):
        assert refused(set_mempolicy, MPOL_BIND, nodes) == errno.EINVAL
    # A partly impossible mask is no error: it is silently trimmed.
    set_mempolicy(MPOL_BIND, [0, 5])
    assert get_mempolicy() == (MPOL_BIND, [0])


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.usefixtures("own_policy")
def test_the_kernel_uses_one_bit_less_than_maxnode() -> None:
    assert refused(set_mempolicy, MPOL_BIND, [1], 2) == errno.EINVAL
    set_mempolicy(MPOL_BIND, [0, 1], maxnode=2)
    assert get_mempolicy() == (MPOL_BIND, [0])
    set_mempolicy(MPOL_BIND, [1], maxnode=3)
    assert get_mempolicy() == (MPOL_BIND, [1])


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.usefixtures("own_policy")
def test_a_spawned_child_is_born_with_its_starters_policy() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with here, there:
        child = context.Process(target=send_own_state, args=(there,))
        set_mempolicy(MPOL_BIND, [1])
        os.sched_setaffinity(0, {2, 3})
        child.start()
        set_mempolicy(MPOL_DEFAULT)
        assert here.poll(60)
        policy, pages, cpus = here.recv()
        child.join(60)
        child.close()
    assert policy == (MPOL_BIND, [1])
    assert cpus == [2, 3]
    assert pages.get(1, 0) > 500
    assert pages.get(0, 0) == 0, "private pages on the other node"


@pytest.mark.guest("2n", "2n-arm")
def test_an_interpreter_that_binds_itself_leaves_pages_behind() -> None:
    code = (
        "import json, os\nos.sched_setaffinity(0, {2, 3})\nimport guest_support as g\n"
        "g.set_mempolicy(g.MPOL_BIND, [1])\nprint(json.dumps(g.private_pages()))"
    )
    pages = run_python(code, before=lambda: os.sched_setaffinity(0, {0, 1}))
    assert pages.get("0", 0) > 200, "if this fails, birth binding has become needless"


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.usefixtures("own_policy")
def test_a_shared_segments_policy_beats_the_touchers() -> None:
    descriptor = os.memfd_create("segment")
    try:
        os.ftruncate(descriptor, 32 * 4096)
        with mapping(32, descriptor) as (_, address):
            mbind(address, 16 * 4096, MPOL_BIND, [1])
        # The policy of the first half lives with the file, not with the mapping that set it.
        set_mempolicy(MPOL_BIND, [0])
        with mapping(32, descriptor) as (memory, address):
            touch(memory)
            assert page_nodes(address, 32) == [1] * 16 + [0] * 16
            # Later than the first touch a policy moves nothing by itself.
            mbind(address, 32 * 4096, MPOL_BIND, [1])
            assert page_nodes(address, 32) == [1] * 16 + [0] * 16
    finally:
        os.close(descriptor)


def _try_to_move(descriptor: int) -> list[int]:
    with mapping(8, descriptor) as (memory, address):
        touch(memory)
        mbind(address, 8 * 4096, MPOL_BIND, [1], MPOL_MF_MOVE)
        return page_nodes(address, 8)


@pytest.mark.guest("2n", "2n-arm")
def test_moving_pages_that_another_process_maps_does_nothing_and_succeeds() -> None:
    descriptor = os.memfd_create("segment")
    try:
        os.ftruncate(descriptor, 8 * 4096)
        with mapping(8, descriptor) as (memory, address):
            mbind(address, 8 * 4096, MPOL_BIND, [0])
            touch(memory)
            assert in_child(_try_to_move, descriptor) == [0] * 8
            mbind(address, 8 * 4096, MPOL_BIND, [1], MPOL_MF_MOVE)
            assert page_nodes(address, 8) == [1] * 8, "with one mapper left the move works"
    finally:
        os.close(descriptor)


def _inside_a_cpuset(group: Path) -> list[object]:
    join(group)
    allowed = get_mempolicy(MPOL_F_MEMS_ALLOWED)[1]
    errors = [refused(set_mempolicy, MPOL_BIND, nodes) for nodes in ([1], [0, 1])]
    shown = (NODES / "has_memory").read_text().strip()
    return [allowed, errors, get_mempolicy(), sorted(os.sched_getaffinity(0)), shown]


@pytest.mark.guest("2n", "2n-arm")
def test_a_cpuset_hides_a_node_that_sysfs_still_shows() -> None:
    with cpuset(cpus="0-1", mems="0") as group:
        seen = in_child(_inside_a_cpuset, group)
    assert seen == [[0], [errno.EINVAL, 0], [MPOL_BIND, [0]], [0, 1], "0-1"]


def _while_the_cpuset_shrinks(group: Path) -> list[object]:
    join(group)
    os.sched_setaffinity(0, {2, 3})
    set_mempolicy(MPOL_BIND, [1])
    seen: list[object] = []
    for cpus, mems in (("0-1", "0"), ("0-3", "0-1")):
        write_kernel_file(group / "cpuset.cpus", cpus)
        write_kernel_file(group / "cpuset.mems", mems)
        seen.append([sorted(os.sched_getaffinity(0)), get_mempolicy()[1]])
    return seen


@pytest.mark.guest("2n", "2n-arm")
def test_a_shrinking_cpuset_rewrites_policy_and_affinity_for_good() -> None:
    with cpuset(cpus="0-3", mems="0-1") as group:
        seen = in_child(_while_the_cpuset_shrinks, group)
    assert seen == [[[0, 1], [0]], [[0, 1, 2, 3], [0]]]


def _behind_a_filter(error: int) -> list[object]:
    refuse_policy_calls(error)
    with mapping(1) as (memory, address):
        touch(memory)
        calls = [
            refused(set_mempolicy, MPOL_BIND, [1]),
            refused(get_mempolicy),
            refused(mbind, address, 4096, MPOL_BIND, [1]),
            refused(page_nodes, address, 1),
        ]
    os.sched_setaffinity(0, {2})
    return [calls, sorted(os.sched_getaffinity(0)), bool(anonymous_mappings())]


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_container_filter_refuses_the_policy_and_leaves_affinity(error: int) -> None:
    assert in_child(_behind_a_filter, error) == [[error] * 4, [2], True]


def _first_touch(cpus: set[int]) -> list[int]:
    os.sched_setaffinity(0, cpus)
    with mapping(16) as (memory, address):
        touch(memory)
        return page_nodes(address, 16)


@pytest.mark.guest("memless")
def test_a_cpu_only_node_borrows_memory() -> None:
    assert in_child(_first_touch, {2, 3}) == [0] * 16
