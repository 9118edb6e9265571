"""What one NUMA node can give right now: does it exist, has it memory, may we use it, how much is left.

Live figures for those who are about to allocate; the description of the machine as a whole is ``topo``'s.
Sources: Documentation/admin-guide/mm/numaperf.rst, Documentation/filesystems/proc.rst (meminfo, MemAvailable),
Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.current, memory.stat) and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from numa_collectors._cpulist import format_cpulist, parse_cpulist
from numa_collectors.errors import BindingError, NodeCapacityError

__all__ = [
    "allowed_nodes",
    "available_bytes",
    "cgroup_headroom_bytes",
    "cgroup_place",
    "check_nodes",
    "check_room",
    "format_bytes",
    "memory_nodes",
    "node_cpus",
    "node_headroom_bytes",
    "online_nodes",
]

_MIB = 1 << 20
# Under the policy ``bind`` the OOM killer comes before the last page is used: the kernel keeps its watermarks free,
# about 11 MiB of a 250 MiB node, a smaller share of a large one (mm/page_alloc.c: setup_per_zone_wmarks), and for a while
# after fragmentation two and a half times as much (vm.watermark_boost_factor, admin-guide/sysctl/vm.rst).
_MIN_RESERVE_BYTES = 64 * _MIB
_RESERVE_SHARE = 100


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None


def _node_dir(root: str | os.PathLike[str]) -> Path:
    return Path(root) / "sys/devices/system/node"


def _cpulist_file(path: Path) -> tuple[int, ...] | None:
    text = _text(path)
    return None if text is None else parse_cpulist(text)


def online_nodes(root: str | os.PathLike[str] = "/") -> tuple[int, ...]:
    """Return the online nodes; ``(0,)`` where the kernel describes none."""
    nodes = _cpulist_file(_node_dir(root) / "online")
    return nodes or (0,)


def memory_nodes(root: str | os.PathLike[str] = "/") -> tuple[int, ...]:
    """Return the nodes with memory; all online ones where the kernel does not say."""
    nodes = _cpulist_file(_node_dir(root) / "has_memory")
    return online_nodes(root) if nodes is None else nodes


def allowed_nodes(root: str | os.PathLike[str] = "/", pid: int | None = None) -> tuple[int, ...] | None:
    """Return ``Mems_allowed_list`` of a process, readable also where a filter refuses the policy calls."""
    process = "self" if pid is None else str(pid)
    for line in (_text(Path(root) / "proc" / process / "status") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return parse_cpulist(value)
    return None


def node_cpus(node: int, root: str | os.PathLike[str] = "/") -> tuple[int, ...]:
    """Return the online CPUs of ``node``; empty for a node without CPUs or one that does not exist."""
    return _cpulist_file(_node_dir(root) / f"node{node}" / "cpulist") or ()


def check_nodes(nodes: Iterable[int], root: str | os.PathLike[str] = "/") -> None:
    """Raise ``BindingError`` for the first of ``nodes`` that memory cannot be asked of.

    The kernel would say EINVAL for each cause alike, or silently drop the node from a mask; libnuma would crash on it.
    Codes: ``node-missing``, ``node-without-memory``, ``node-not-allowed``.
    """
    online, memory, allowed = online_nodes(root), memory_nodes(root), allowed_nodes(root)
    for node in nodes:
        if node not in online:
            raise BindingError(
                f"expected an online NUMA node ({format_cpulist(online)}), got {node}", code="node-missing"
            )
        if node not in memory:
            raise BindingError(
                f"expected a NUMA node with memory ({format_cpulist(memory)}), got {node}, which has none",
                code="node-without-memory",
            )
        if allowed is not None and node not in allowed:
            raise BindingError(
                f"expected a NUMA node that this process may allocate from ({format_cpulist(allowed) or 'none'}), got "
                f"{node}; widen cpuset.mems of its cgroup (docker: --cpuset-mems)",
                code="node-not-allowed",
            )


def _meminfo(path: Path) -> dict[str, int]:
    """Return the figures of a meminfo file in bytes; a node's lines begin with ``Node 3``."""
    figures: dict[str, int] = {}
    for line in (_text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        words = value.split()
        if colon and words and words[0].isdigit():
            figures[name.split()[-1]] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return figures


def _reserve_bytes(total_bytes: int) -> int:
    """Return what of a node's memory is left alone so that the kernel's watermarks are never reached."""
    return max(_MIN_RESERVE_BYTES, total_bytes // _RESERVE_SHARE)


def available_bytes(free_bytes: int, reclaimable_bytes: int, total_bytes: int) -> int:
    """Return what of a node's memory can be allocated at once under ``bind`` without anybody being killed.

    Half of the page cache counts.  The rest may be what running programs are executed from or what is being written
    back: the kernel gives it up late, and an allocation that may go nowhere else ends in an out-of-memory kill meanwhile
    (its own MemAvailable is an estimate with the same caution, Documentation/filesystems/proc.rst).
    """
    return max(0, free_bytes + reclaimable_bytes // 2 - _reserve_bytes(total_bytes))


def node_headroom_bytes(node: int | None, root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes that can be allocated on ``node`` (None: on all allowed nodes) without reaching the watermarks.

    See :func:`available_bytes`, with the page cache on the file lists and reclaimable slab; None where unknown.
    """
    if node is None:
        allowed = allowed_nodes(root)
        usable = [one for one in memory_nodes(root) if allowed is None or one in allowed]
        known = [bytes_left for one in usable if (bytes_left := node_headroom_bytes(one, root)) is not None]
        return sum(known) if known else None
    figures = _meminfo(_node_dir(root) / f"node{node}" / "meminfo")
    if not figures and node == 0:
        figures = _meminfo(Path(root) / "proc/meminfo")
    if "MemFree" not in figures:
        return None
    reclaimable = sum(figures.get(name, 0) for name in ("Active(file)", "Inactive(file)", "SReclaimable"))
    return available_bytes(figures["MemFree"], reclaimable, figures.get("MemTotal", 0))


def _read_int(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _group_headroom(group: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _read_int(group / limit_name), _read_int(group / usage_name)
    if limit is None or usage is None or limit >= 1 << 62:
        return None
    reclaimable = 0
    for line in (_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("active_file", "inactive_file") and value.strip().isdigit():
            reclaimable += int(value)
    return max(0, limit - usage + reclaimable)


def cgroup_headroom_bytes(root: str | os.PathLike[str] = "/") -> int | None:
    """Return the bytes left under the tightest memory limit of this process's cgroups, v2 and v1; None for no limit."""
    base = Path(root)
    headrooms: list[int | None] = []
    for line in (_text(base / "proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            mount, names = base / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = base / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a cgroup namespace the path may lead out of it ("/../.."); the mount point itself is then the group.
        parts = [part for part in path.split("/") if part and part != ".."]
        headrooms += [_group_headroom(mount.joinpath(*parts[:depth]), *names) for depth in range(len(parts), -1, -1)]
    known = [headroom for headroom in headrooms if headroom is not None]
    return min(known) if known else None


def format_bytes(count: int) -> str:
    """Return ``count`` in MiB or GiB, as people read it."""
    return f"{count / _MIB:.0f} MiB" if count < 10 * 1024 * _MIB else f"{count / (1024 * _MIB):.1f} GiB"


def check_room(what: str, need_bytes: int, *places: tuple[str, int | None]) -> None:
    """Raise ``NodeCapacityError`` if one of ``places`` (a name, its free bytes) cannot hold ``need_bytes``.

    The check comes before any allocation: over a node's capacity the policy ``bind`` means SIGKILL, never an error.
    """
    for place, bytes_left in places:
        if bytes_left is not None and need_bytes > bytes_left:
            raise NodeCapacityError(
                f"{what} needs {format_bytes(need_bytes)}, but {place} has {format_bytes(bytes_left)} left; "
                "use smaller rings (ring_capacity, ring_max_bytes), another node, or the memory policy 'preferred'"
            )


def cgroup_place(root: str | os.PathLike[str] = "/") -> tuple[str, int | None]:
    """Return the tightest memory limit of this process's cgroups as a place for :func:`check_room`."""
    return "the cgroup's memory limit", cgroup_headroom_bytes(root)


def described(root: str | os.PathLike[str] = "/") -> bool:
    """Return whether the kernel describes NUMA nodes at all."""
    return _text(_node_dir(root) / "online") is not None


def nodes_of_cpus(cpus: Iterable[int], root: str | os.PathLike[str] = "/") -> tuple[int, ...]:
    """Return the nodes that ``cpus`` belong to, by the ``nodeN`` links of each CPU's folder."""
    nodes: set[int] = set()
    for cpu in cpus:
        try:
            names = os.listdir(Path(root) / f"sys/devices/system/cpu/cpu{cpu}")
        except OSError:
            continue  # an absent CPU belongs to no node
        nodes.update(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdigit())
    return tuple(sorted(nodes))


def online_cpus(root: str | os.PathLike[str] = "/") -> tuple[int, ...] | None:
    """Return the online CPUs, or None where the kernel does not say."""
    return _cpulist_file(Path(root) / "sys/devices/system/cpu/online")
