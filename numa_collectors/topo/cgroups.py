"""What the process was given: cpusets, masks, CPU quotas and memory limits, cgroup v1 and v2.

Sources: Documentation/admin-guide/cgroup-v2.rst (``cpuset.cpus.effective``, ``cpu.max``, ``memory.max``),
cgroup-v1/cpusets.rst, scheduler/sched-bwc.rst, and proc(5) for ``Cpus_allowed_list`` and ``Mems_allowed_list``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from numa_collectors._cpulist import parse_cpulist, parse_cpumap
from numa_collectors.topo.files import Root

__all__ = ["Limits", "read_limits"]

# cgroup v1 writes "no limit" as the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Limits:
    """None means that nothing limits it."""

    cpus: tuple[int, ...] | None
    nodes: tuple[int, ...] | None
    quota_cpus: float | None
    memory_limit_bytes: int | None
    memory_headroom_bytes: int | None
    version: str | None


@dataclass(frozen=True, slots=True)
class _Mount:
    path: str
    # The directory of the hierarchy that is mounted there; other than "/" in a container without its own namespace.
    root: str
    kind: str
    controllers: frozenset[str]


def read_limits(root: Root) -> Limits:
    mounts = _mounts(root)
    paths = _paths(root)
    cpus, nodes = _status(root)
    quota: float | None = None
    memory: list[tuple[int, int]] = []
    for mount in mounts:
        directories = list(_directories(mount, paths))
        if mount.kind != "cgroup" or "cpuset" in mount.controllers:
            cpus = _narrow(cpus, _cpuset(root, directories, "cpus"))
            nodes = _narrow(nodes, _cpuset(root, directories, "mems"))
        for directory in directories:
            quota = _least(quota, _quota(root, directory))
            limit = _memory_limit(root, directory)
            if limit is not None:
                memory.append(limit)
    return Limits(
        cpus,
        nodes,
        quota,
        min((limit for limit, _ in memory), default=None),
        min((headroom for _, headroom in memory), default=None),
        _version({mount.kind for mount in mounts}),
    )


def _version(kinds: set[str]) -> str | None:
    if "cgroup2" not in kinds:
        return "v1" if kinds else None
    return "v2" if kinds == {"cgroup2"} else "hybrid"


def _least(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def _narrow(first: tuple[int, ...] | None, second: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if first is None or second is None:
        return second if first is None else first
    return tuple(sorted(set(first) & set(second)))


def _status(root: Root) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return ``Cpus_allowed`` and ``Mems_allowed`` of the process; lists before maps."""
    fields: dict[str, str] = {}
    for line in (root.read("proc/self/status") or "").splitlines():
        name, _, value = line.partition(":")
        fields[name] = value.strip()
    found: list[tuple[int, ...] | None] = []
    for name in ("Cpus_allowed", "Mems_allowed"):
        try:
            if name + "_list" in fields:
                found.append(parse_cpulist(fields[name + "_list"]))
            else:
                found.append(parse_cpumap(fields[name]) if name in fields else None)
        except ValueError as error:
            root.problems.append(f"/proc/self/status: {name}: {error}")
            found.append(None)
    return found[0], found[1]


def _mounts(root: Root) -> list[_Mount]:
    """Return the cgroup mounts, from mountinfo or, where that is absent, from mounts."""
    mounts = []
    for line in (root.read("proc/self/mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if separator and len(before) >= 5 and len(after) >= 3:
            mounts.append(_mount(before[4], before[3], after[0], after[2]))
    if not mounts:
        for line in (root.read("proc/self/mounts") or root.read("proc/mounts") or "").splitlines():
            parts = line.split()
            if len(parts) >= 4:
                mounts.append(_mount(parts[1], "/", parts[2], parts[3]))
    return [mount for mount in mounts if mount.kind in ("cgroup", "cgroup2", "cpuset")]


def _mount(path: str, root: str, kind: str, options: str) -> _Mount:
    return _Mount(path.strip("/"), root, kind, frozenset(options.split(",")))


def _paths(root: Root) -> dict[str, str]:
    """Return the process's group by controller; ``""`` is the v2 hierarchy, ``"cpuset"`` also the old cpuset file."""
    paths: dict[str, str] = {}
    cpuset = root.read("proc/self/cpuset")
    if cpuset:
        paths["cpuset"] = cpuset
        paths[""] = cpuset
    for line in (root.read("proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _directories(mount: _Mount, paths: dict[str, str]) -> Iterator[str]:
    """Yield the process's directory below the mount, then each ancestor up to the mount itself."""
    controllers = [""] if mount.kind == "cgroup2" else sorted(mount.controllers | {"cpuset"} & {mount.kind})
    path = next((paths[name] for name in controllers if name in paths), "/")
    if mount.root != "/":
        inside = path == mount.root or path.startswith(mount.root.rstrip("/") + "/")
        path = path[len(mount.root) :] if inside else "/"
    # A path that climbs out ("/../..") belongs to a process outside this cgroup namespace: the mount is all we see.
    parts = [] if ".." in path.split("/") else [part for part in path.split("/") if part]
    for length in range(len(parts), -1, -1):
        yield "/".join([mount.path, *parts[:length]])


def _cpuset(root: Root, directories: list[str], what: str) -> tuple[int, ...] | None:
    """Return the set of the nearest group that states one: what the kernel enforces before what was asked for."""
    names = (f"cpuset.{what}.effective", f"cpuset.effective_{what}", f"cpuset.{what}", what)
    for directory in directories:
        for name in names:
            ids = root.cpulist(f"{directory}/{name}")
            if ids:
                return ids
    return None


def _quota(root: Root, directory: str) -> float | None:
    """Return the group's CPU quota in CPUs."""
    quota_text, _, period_text = (root.read(f"{directory}/cpu.max") or "").partition(" ")
    if not quota_text:
        quota_text = root.read(f"{directory}/cpu.cfs_quota_us") or ""
        period_text = root.read(f"{directory}/cpu.cfs_period_us") or ""
    if not (quota_text.isdigit() and period_text.isdigit()) or int(period_text) == 0:
        # "max" in v2 and -1 in v1: no quota.
        return None
    return int(quota_text) / int(period_text)


def _memory_limit(root: Root, directory: str) -> tuple[int, int] | None:
    """Return the group's memory limit and what is left of it, in bytes."""
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        text = root.read(f"{directory}/{limit_name}")
        if text is not None and text.isdigit() and int(text) < _NO_LIMIT_BYTES:
            usage = root.integer(f"{directory}/{usage_name}") or 0
            return int(text), max(0, int(text) - usage)
    return None
