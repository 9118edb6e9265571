"""Facts of the kernel that the library rests on, asked by raw system calls: a kernel that differs shows here first."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from guest_support import (
    MPOL_BIND,
    MPOL_DEFAULT,
    MPOL_MF_MOVE,
    NODES,
    cpuset,
    get_mempolicy,
    join,
    mapping,
    mbind,
    node_file,
    node_memory_kib,
    page_nodes,
    private_pages,
    refuse_policy_calls,
    run_python,
    set_mempolicy,
    touch,
)

TWO_NODES = ("2n", "smt", "pci", "oddeven", "small", "2n-arm")

# online | has_cpu | has_memory | cpulist of each online node | distance rows
EXPECTED = {
    "2n": ("0-1", "0-1", "0-1", ["0-1", "2-3"], ["10 21", "21 10"]),
    "2n-arm": ("0-1", "0-1", "0-1", ["0-1", "2-3"], ["10 21", "21 10"]),
    "smt": ("0-1", "0-1", "0-1", ["0-3", "4-7"], ["10 21", "21 10"]),
    "oddeven": ("0-1", "0-1", "0-1", ["0,2", "1,3"], ["10 21", "21 10"]),
    "small": ("0-1", "0-1", "0-1", ["0-1", "2-3"], ["10 21", "21 10"]),
    "pci": ("0-1", "0-1", "0-1", ["0-1", "2-3"], ["10 21", "21 10"]),
    "4n": (
        "0-3",
        "0-3",
        "0-3",
        ["0", "1", "2", "3"],
        ["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"],
    ),
    "8n": (
        "0-7",
        "0-7",
        "0-7",
        [str(node) for node in range(8)],
        [" ".join(str(10 + 2 * abs(a - b)) for b in range(8)) for a in range(8)],
    ),
    "memonly": ("0-2", "0-1", "0-2", ["0-1", "2-3", ""], ["10 21 17", "21 10 28", "17 28 10"]),
    "memless": ("0-1", "0-1", "0", ["0-1", "2-3"], ["10 21", "21 10"]),
    # Columns of a distance row are the online nodes only: column 1 is node 2.
    "sparse": ("0,2", "0,2", "0,2", ["0-1", "2-3"], ["10 31", "31 10"]),
}


@pytest.fixture
def own_policy() -> Iterator[None]:
    """Give the thread its policy and affinity back."""
    affinity = os.sched_getaffinity(0)
    yield
    set_mempolicy(MPOL_DEFAULT)
    os.sched_setaffinity(0, affinity)


@pytest.mark.guest(*EXPECTED)
def test_the_guest_is_the_machine_that_was_asked_for(topology_name: str) -> None:
    online, has_cpu, has_memory, cpulists, distances = EXPECTED[topology_name]
    ids = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    assert (NODES / "online").read_text().strip() == online
    assert (NODES / "has_cpu").read_text().strip() == has_cpu
    assert (NODES / "has_memory").read_text().strip() == has_memory
    assert [node_file(node, "cpulist") for node in ids] == cpulists
    assert [" ".join(node_file(node, "distance").split()) for node in ids] == distances


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


@pytest.mark.guest(*EXPECTED)
@pytest.mark.usefixtures("own_policy")
def test_each_node_with_memory_takes_a_policy_and_pages() -> None:
    for node in [int(path.name[4:]) for path in NODES.glob("node[0-9]*")]:
        if node_memory_kib(node) == 0:
            with pytest.raises(OSError, match="Invalid argument"):
                set_mempolicy(MPOL_BIND, [node])
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
        with pytest.raises(OSError, match="Invalid argument"):
            set_mempolicy(MPOL_BIND, nodes)
    # A partly impossible mask is no error: it is silently trimmed.
    set_mempolicy(MPOL_BIND, [0, 5])
    assert get_mempolicy() == (MPOL_BIND, [0])


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.usefixtures("own_policy")
def test_the_kernel_uses_one_bit_less_than_maxnode() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        set_mempolicy(MPOL_BIND, [1], maxnode=2)
    set_mempolicy(MPOL_BIND, [0, 1], maxnode=2)
    assert get_mempolicy() == (MPOL_BIND, [0])
    set_mempolicy(MPOL_BIND, [1], maxnode=3)
    assert get_mempolicy() == (MPOL_BIND, [1])


def _report(pipe: Connection) -> None:
    pipe.send((get_mempolicy(), private_pages(), sorted(os.sched_getaffinity(0))))
    pipe.close()


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.usefixtures("own_policy")
def test_a_spawned_child_is_born_with_its_starters_policy() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    with here, there:
        child = context.Process(target=_report, args=(there,))
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
    assert isinstance(pages, dict)
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


@pytest.mark.guest("2n")
def test_moving_pages_that_another_process_maps_does_nothing_and_succeeds() -> None:
    descriptor = os.memfd_create("segment")
    try:
        os.ftruncate(descriptor, 8 * 4096)
        code = (
            "import json, os, sys\nimport guest_support as g\nfd = os.open(sys.argv[1], os.O_RDWR)\n"
            "with g.mapping(8, fd) as (m, a):\n"
            "    sum(m[i] for i in range(0, len(m), 4096))\n    g.mbind(a, 8 * 4096, g.MPOL_BIND, [1], g.MPOL_MF_MOVE)\n"
            "    print(json.dumps(g.page_nodes(a, 8)))"
        )
        with mapping(8, descriptor) as (memory, address):
            mbind(address, 8 * 4096, MPOL_BIND, [0])
            touch(memory)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            assert run_python(code, path) == [0] * 8
            mbind(address, 8 * 4096, MPOL_BIND, [1], MPOL_MF_MOVE)
            assert page_nodes(address, 8) == [1] * 8, "with one mapper left the move works"
    finally:
        os.close(descriptor)


@pytest.mark.guest("2n", "2n-arm")
def test_a_cpuset_hides_a_node_that_sysfs_still_shows() -> None:
    code = (
        "import json, os\nimport guest_support as g\n"
        "def refused(nodes):\n"
        "    try:\n        g.set_mempolicy(g.MPOL_BIND, nodes)\n    except OSError as error:\n        return error.errno\n"
        "    return 0\n"
        "print(json.dumps([g.get_mempolicy(g.MPOL_F_MEMS_ALLOWED)[1], refused([1]), refused([0, 1]), g.get_mempolicy(),"
        " sorted(os.sched_getaffinity(0)), (g.NODES / 'has_memory').read_text().strip()]))"
    )
    with cpuset(cpus="0-1", mems="0") as group:
        seen = run_python(code, before=lambda: join(group))
    assert seen == [[0], errno.EINVAL, 0, [MPOL_BIND, [0]], [0, 1], "0-1"]


@pytest.mark.guest("2n")
def test_a_shrinking_cpuset_rewrites_policy_and_affinity_for_good() -> None:
    code = (
        "import json, os, sys\nimport guest_support as g\nfrom pathlib import Path\n"
        "group = Path(sys.argv[1])\nos.sched_setaffinity(0, {2, 3})\ng.set_mempolicy(g.MPOL_BIND, [1])\nseen = []\n"
        "for cpus, mems in (('0-1', '0'), ('0-3', '0-1')):\n"
        "    g.write_kernel_file(group / 'cpuset.cpus', cpus)\n    g.write_kernel_file(group / 'cpuset.mems', mems)\n"
        "    seen.append([sorted(os.sched_getaffinity(0)), g.get_mempolicy()[1]])\n"
        "print(json.dumps(seen))"
    )
    with cpuset(cpus="0-3", mems="0-1") as group:
        seen = run_python(code, str(group), before=lambda: join(group))
    assert seen == [[[0, 1], [0]], [[0, 1, 2, 3], [0]]]


@pytest.mark.guest("2n", "2n-arm")
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_container_filter_refuses_the_policy_and_leaves_affinity(error: int) -> None:
    code = (
        "import json, os\nimport guest_support as g\n"
        "def refused(call, *arguments):\n"
        "    try:\n        call(*arguments)\n    except OSError as problem:\n        return problem.errno\n    return 0\n"
        "with g.mapping(1) as (m, a):\n    g.touch(m)\n    os.sched_setaffinity(0, {2})\n"
        "    print(json.dumps([refused(g.set_mempolicy, g.MPOL_BIND, [1]), refused(g.get_mempolicy),"
        " refused(g.mbind, a, 4096, g.MPOL_BIND, [1]), refused(g.page_nodes, a, 1), sorted(os.sched_getaffinity(0)),"
        " bool(g.anonymous_mappings())]))"
    )
    seen = run_python(code, before=lambda: refuse_policy_calls(error))
    assert seen == [error, error, error, error, [2], True]


@pytest.mark.guest("memless")
def test_a_cpu_only_node_borrows_memory() -> None:
    code = (
        "import json\nimport guest_support as g\n"
        "with g.mapping(16) as (m, a):\n    g.touch(m)\n    print(json.dumps(g.page_nodes(a, 16)))"
    )
    assert run_python(code, before=lambda: os.sched_setaffinity(0, {2, 3})) == [0] * 16


@pytest.mark.guest("small")
def test_preferred_spills_where_bind_would_kill() -> None:
    code = (
        "import json\nimport guest_support as g\ng.set_mempolicy(g.MPOL_PREFERRED, [1])\n"
        "pages = 700 * 256\n"
        "with g.mapping(pages) as (m, a):\n    g.touch(m)\n    nodes = g.page_nodes(a, pages)\n"
        "    print(json.dumps([nodes.count(0), nodes.count(1)]))"
    )
    assert node_memory_kib(1) < 512 * 1024
    on_0, on_1 = run_python(code)  # type: ignore[misc]
    assert on_0 + on_1 == 700 * 256
    assert on_0 > 0
    assert on_1 > 0
