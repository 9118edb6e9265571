"""The machines that the project ships, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from numa_collectors.testing.machines.builder import Builder, Machine

__all__ = ["MACHINES"]

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
MACHINES: dict[str, Callable[[], Machine]] = {}


def _machine(make: Callable[[], Machine]) -> Callable[[], Machine]:
    MACHINES[make.__name__.strip("_").replace("_", "-")] = make
    return make


def _uuid(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-44445555666{number}"


def _epyc(name: str, nodes_per_package: int, *, l3_as_numa: bool = False) -> Builder:
    """Two EPYC 9554: 64 cores each in 8 core complexes of 8 cores."""
    builder = Builder(name, threads=2)
    for node in range(2 * nodes_per_package):
        cores = 64 // nodes_per_package
        builder.node(node, cores=cores, memory_gib=768 / nodes_per_package, package=node // nodes_per_package)
    builder.number()
    total = 2 * nodes_per_package
    same = 11 if l3_as_numa else 12
    rows = [
        [10 if i == j else same if i // nodes_per_package == j // nodes_per_package else 32 for j in range(total)]
        for i in range(total)
    ]
    return builder.distances(rows)


@_machine
def epyc_nps1() -> Machine:
    return _epyc("epyc-nps1", 1).build()


@_machine
def epyc_nps2() -> Machine:
    return _epyc("epyc-nps2", 2).build()


@_machine
def epyc_nps4_8gpu() -> Machine:
    """Eight GPUs and eight NICs, one of each on every node, numbered against the nodes' order."""
    builder = _epyc("epyc-nps4-8gpu", 4)
    for index in range(8):
        node = (3 - index) % 4 + index // 4 * 4
        builder.nvidia(f"0000:{index * 16 + 1:02x}:00.0", node, index, _uuid(index))
        builder.device(f"0000:{index * 16 + 2:02x}:00.0", "0x020700", "0x15b3", "0x1021", node)
    return builder.build()


@_machine
def epyc_l3_as_numa() -> Machine:
    return _epyc("epyc-l3-as-numa", 8, l3_as_numa=True).build()


def _xeon(name: str, clusters: int, hbm_gib: int = 0) -> Builder:
    """Two 56-core Xeons with sub-NUMA clusters, each cluster with its part of the L3; optionally HBM as nodes."""
    builder = Builder(name, threads=2)
    total = 2 * clusters
    for node in range(total):
        cores = 56 // clusters
        builder.node(node, cores=cores, memory_gib=512 / clusters, package=node // clusters, cores_per_l3=cores)
    builder.number()
    memory = total if hbm_gib else 0
    for node in range(memory):
        builder.node(total + node, memory_gib=hbm_gib)
    rows = []
    for i in range(total + memory):
        row = []
        for j in range(total + memory):
            near = i % total // clusters == j % total // clusters
            extra = 3 if (i >= total) != (j >= total) or (i >= total and i != j) else 0
            row.append(10 if i == j else (10 if i % total == j % total else 12 if near else 21) + extra)
        rows.append(row)
    return builder.distances(rows)


@_machine
def xeon_snc2() -> Machine:
    return _xeon("xeon-snc2", 2).build()


@_machine
def xeon_snc4() -> Machine:
    return _xeon("xeon-snc4", 4).build()


@_machine
def xeon_max_hbm_flat() -> Machine:
    """SNC4 with HBM in flat mode: nodes 8-15 are memory only."""
    return _xeon("xeon-max-hbm-flat", 4, hbm_gib=16).build()


def _grace(name: str, chips: int, gpus: dict[int, int], last_node: int) -> Machine:
    """Grace CPUs with GPUs whose memory is a NUMA node; the driver reserves empty nodes for MIG instances."""
    builder = Builder(name)
    for node in range(chips):
        builder.node(node, cores=72, memory_gib=480, package=node, cores_per_l3=72)
    builder.number()
    for node in range(chips, last_node + 1):
        builder.node(node, memory_gib=186 if node in gpus else 0)
    nodes = range(last_node + 1)
    rows = [[10 if i == j else 40 if i < chips and j < chips else 80 for j in nodes] for i in nodes]
    builder.distances(rows)
    for index, (memory_node, home) in enumerate(gpus.items()):
        builder.nvidia(f"{8 + index:04x}:01:00.0", home, index, _uuid(index), memory_node=memory_node)
    return builder.build()


@_machine
def gb200() -> Machine:
    """34 nodes: two with CPUs, four with GPU memory, 28 empty."""
    return _grace("gb200", 2, {2: 0, 10: 0, 18: 1, 26: 1}, 33)


@_machine
def gh200() -> Machine:
    return _grace("gh200", 1, {1: 0}, 8)


@_machine
def cxl_expander() -> Machine:
    builder = Builder("cxl-expander", threads=2)
    for node in range(2):
        builder.node(node, cores=16, memory_gib=256, package=node, cores_per_l3=16)
    builder.number().node(2, memory_gib=512)
    return builder.distances([[10, 21, 14], [21, 10, 24], [14, 24, 10]]).build()


@_machine
def threadripper_2990wx() -> Machine:
    """Dies 1 and 3 have cores and no memory."""
    builder = Builder("threadripper-2990wx", threads=2)
    for node in range(4):
        builder.node(node, cores=8, memory_gib=0 if node % 2 else 64, cores_per_l3=4)
    return builder.number().distances(remote=16).build()


@_machine
def cpus_2048() -> Machine:
    builder = Builder("cpus-2048", threads=2)
    for node in range(32):
        builder.node(node, cores=32, memory_gib=128, package=node // 2)
    return builder.number().distances(remote=32).build()


@_machine
def nodes_1024() -> Machine:
    builder = Builder("nodes-1024")
    for node in range(1024):
        builder.node(node, cores=1, memory_gib=4, package=node // 16, cores_per_l3=None)
    return builder.number().distances(remote=40).build()


@_machine
def sparse_ids() -> Machine:
    """Node ids over 255 and far apart."""
    builder = Builder("sparse-ids")
    for index, node in enumerate((0, 8, 256, 1000)):
        builder.node(node, cores=4, memory_gib=32, package=index, cores_per_l3=4)
    return builder.number().distances(remote=20).build()


@_machine
def nosmt() -> Machine:
    """SMT switched off: second threads are present and offline."""
    builder = Builder("nosmt", threads=2)
    for node in range(2):
        builder.node(node, cores=8, memory_gib=64, package=node)
    builder.number().distances()
    builder.offline = tuple(range(16, 32))
    builder.files[f"{_CPU}/smt/control"] = "forceoff\n"
    return builder.build()


@_machine
def power_smt8() -> Machine:
    builder = Builder("power-smt8", threads=8, ids="blocked")
    for index, node in enumerate((0, 8)):
        builder.node(node, cores=10, memory_gib=256, package=index, cores_per_l3=1)
    return builder.number().distances(remote=40).build()


@_machine
def isolcpus() -> Machine:
    """CPUs 4-7 are isolated; the process was put on 0-5 by hand."""
    builder = Builder("isolcpus").node(0, cores=4, memory_gib=16).node(1, cores=4, memory_gib=16, package=1)
    builder.number().distances().status(range(6), (0, 1))
    builder.files[f"{_CPU}/isolated"] = "4-7\n"
    return builder.build()


@_machine
def hot_removed() -> Machine:
    """CPUs 3 and 9 are gone for good, 5 is offline; node 1's list still names all of its CPUs."""
    builder = Builder("hot-removed").node(0, cores=6, memory_gib=16).node(1, cores=6, memory_gib=16, package=1)
    builder.number().distances()
    builder.unplugged, builder.offline = (3, 9), (5,)
    builder.files[f"{_NODE}/node1/cpulist"] = "6-11\n"
    return builder.build(dangling=(f"{_CPU}/cpu9",))


@_machine
def arm_big_little() -> Machine:
    builder = Builder("arm-big-little").node(0, cores=8, memory_gib=8, cores_per_l3=8).number()
    for cpu in range(8):
        builder.files[f"{_CPU}/cpu{cpu}/cpu_capacity"] = f"{1024 if cpu >= 4 else 446}\n"
    return builder.distances().build()


@_machine
def intel_hybrid() -> Machine:
    """Eight P-cores with two threads (CPUs 0-15 in pairs) and eight E-cores with one."""
    builder = Builder("intel-hybrid").node(0, cores=16, memory_gib=32, cores_per_l3=16)
    builder.cores = [(2 * core, 2 * core + 1) for core in range(8)] + [(16 + core,) for core in range(8)]
    builder.files["sys/devices/cpu_core/cpus"] = "0-15\n"
    builder.files["sys/devices/cpu_atom/cpus"] = "16-23\n"
    return builder.distances().build()


def _two_nodes(name: str) -> Builder:
    builder = Builder(name, threads=2)
    for node in range(2):
        builder.node(node, cores=8, memory_gib=64, package=node)
    return builder.number().distances()


@_machine
def cgroup2_nested() -> Machine:
    """A pod: the quota stands in the middle of the tree, the cpuset in the leaf, a memory limit at the top."""
    builder = _two_nodes("cgroup2-nested")
    base = "sys/fs/cgroup"
    builder.files |= {
        "proc/self/mountinfo": "31 24 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        "proc/self/cgroup": "0::/kubepods/pod1/container\n",
        f"{base}/kubepods/memory.max": f"{96 << 30}\n",
        f"{base}/kubepods/memory.current": f"{16 << 30}\n",
        f"{base}/kubepods/pod1/cpu.max": "600000 100000\n",
        f"{base}/kubepods/pod1/cpuset.cpus.effective": "0-31\n",
        f"{base}/kubepods/pod1/container/cpu.max": "max 100000\n",
        f"{base}/kubepods/pod1/container/memory.max": "max\n",
        f"{base}/kubepods/pod1/container/cpuset.cpus.effective": "0-5,16-21\n",
        f"{base}/kubepods/pod1/container/cpuset.mems.effective": "0\n",
    }
    return builder.build()


@_machine
def cgroup1_limits() -> Machine:
    """Docker on cgroup v1 without a cgroup namespace: the mount's root is the container's own group."""
    builder = _two_nodes("cgroup1-limits")
    group = "/docker/abc"
    mounts = "".join(
        f"{number} 24 0:{number} {group} /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}\n"
        for number, name in ((33, "cpuset"), (34, "cpu,cpuacct"), (35, "memory"))
    )
    builder.files |= {
        "proc/self/mountinfo": mounts,
        "proc/self/cgroup": f"4:memory:{group}\n3:cpu,cpuacct:{group}\n2:cpuset:{group}\n",
        "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "8-15,24-31\n",
        "sys/fs/cgroup/cpuset/cpuset.effective_mems": "1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "450000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{32 << 30}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 << 30}\n",
    }
    return builder.build()


@_machine
def masked_container() -> Machine:
    """sysfs is hidden altogether: only the masks in procfs are left."""
    files = {
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8-11\nMems_allowed_list:\t0-1\n",
        "proc/meminfo": "MemTotal: 33554432 kB\nMemFree: 16777216 kB\n",
    }
    return Machine("masked-container", files)


@_machine
def no_node_directory() -> Machine:
    return _two_nodes("no-node-directory").build(nodes=False)


@_machine
def distances_missing() -> Machine:
    machine = _two_nodes("distances-missing").build()
    return replace(machine, files={path: text for path, text in machine.files.items() if not path.endswith("distance")})


@_machine
def distances_truncated() -> Machine:
    builder = _two_nodes("distances-truncated")
    builder.files[f"{_NODE}/node1/distance"] = "21\n"
    return builder.build()


@_machine
def nul_bytes() -> Machine:
    """Every file ends in a NUL byte, as seen on some arm64 kernels."""
    machine = _two_nodes("nul-bytes").build()
    return replace(machine, files={path: text + "\0" for path, text in machine.files.items()})


@_machine
def unreadable() -> Machine:
    """Node 1's memory and distances, and one CPU's siblings, may not be read."""
    return _two_nodes("unreadable").build(
        denied=(f"{_NODE}/node1/meminfo", f"{_NODE}/node1/distance", f"{_CPU}/cpu2/topology/core_cpus_list")
    )


@_machine
def vanishing() -> Machine:
    """Node 2, CPU 40 and a NIC are listed and gone when they are read."""
    builder = _two_nodes("vanishing")
    machine = builder.build(dangling=(f"{_NODE}/node2", f"{_CPU}/cpu40", "sys/bus/pci/devices/0000:17:00.0"))
    return replace(machine, files=dict(machine.files) | {f"{_NODE}/online": "0-1\n"})


@_machine
def gpu_unknown_node() -> Machine:
    """A virtual machine whose firmware tells no PCI locality."""
    builder = _two_nodes("gpu-unknown-node")
    return builder.nvidia("0000:06:00.0", None, 0, _uuid(0)).nvidia("0000:07:00.0", None, 1, _uuid(1)).build()


@_machine
def container_two_gpus() -> Machine:
    """A container with two of eight GPUs: sysfs shows all, the driver's directory those two."""
    builder = _two_nodes("container-two-gpus")
    for index in range(8):
        pci = f"0000:{index * 16 + 1:02x}:00.0"
        if index in (3, 6):
            builder.nvidia(pci, index // 4, index, _uuid(index))
        else:
            builder.device(pci, "0x030200", "0x10de", "0x2335", index // 4)
    return builder.build()


@_machine
def mi300x() -> Machine:
    """Eight AMD accelerators listed by the compute driver, four a package, and the BMC's display."""
    builder = _two_nodes("mi300x")
    builder.device("0000:02:00.0", "0x030000", "0x1a03", "0x2000", 0)
    for index in range(8):
        bus = index * 16 + 5
        builder.device(f"0000:{bus:02x}:00.0", "0x120000", "0x1002", "0x74a1", index // 4)
        builder.files[f"sys/class/kfd/kfd/topology/nodes/{index + 2}/properties"] = (
            f"simd_count 1216\nlocation_id {bus << 8}\ndomain 0\nunique_id {0x1234567890AB0000 + index}\n"
        )
    for node in range(2):
        builder.files[f"sys/class/kfd/kfd/topology/nodes/{node}/properties"] = "simd_count 0\nlocation_id 0\n"
    return builder.build()


@_machine
def cpuset_hides_memory() -> Machine:
    """CPUs of both nodes, memory of one only."""
    return _two_nodes("cpuset-hides-memory").status(range(32), (0,)).build()


@_machine
def half_cores() -> Machine:
    """A cpuset that cuts through cores: one thread of some, both of others."""
    return _two_nodes("half-cores").status((0, 1, 2, 3, 16, 17, 8, 9, 10), (0, 1)).build()


@_machine
def one_cpu() -> Machine:
    return Builder("one-cpu").node(0, cores=1, memory_gib=2, cores_per_l3=1).distances().build()
