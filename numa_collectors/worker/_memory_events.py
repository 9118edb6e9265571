"""Did the kernel's out-of-memory killer act?  What its counters say, where they may be read.

Sources: Documentation/admin-guide/cgroup-v2.rst (``memory.events``: ``oom_kill``, counted in the group and its
ancestors), cgroup-v1/memory.rst (``memory.oom_control``: ``oom_kill``), mm/vmstat.c (``/proc/vmstat``: ``oom_kill``,
whole machine).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["OomKills"]

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True)
class OomKills:
    """Kills counted so far: in this process's memory cgroup and on the whole machine; None where unreadable."""

    cgroup: int | None
    machine: int | None
    limit_bytes: int | None

    @classmethod
    def read(cls, root: str = "/") -> OomKills:
        """Read the counters below ``root``."""
        base = Path(root)
        directory, counter, limit = _memory_cgroup(base)
        return cls(
            cgroup=None if directory is None else _counter(directory / counter),
            machine=_counter(base / "proc/vmstat"),
            limit_bytes=None if directory is None else _limit(directory / limit),
        )

    def explain_since(self, earlier: OomKills) -> str | None:
        """Say that the killer has acted since ``earlier``; None where no counter moved."""
        if self.cgroup is not None and earlier.cgroup is not None and self.cgroup > earlier.cgroup:
            limit = "" if self.limit_bytes is None else f" of {self.limit_bytes / 2**20:.0f} MiB"
            return (
                f"out of memory: the kernel killed it because its cgroup reached its memory limit{limit} "
                "(oom_kill rose); raise the limit, or use fewer collectors or smaller environments"
            )
        if self.machine is not None and earlier.machine is not None and self.machine > earlier.machine:
            return (
                "out of memory, most likely: the kernel's OOM killer acted on this machine at that time "
                "(/proc/vmstat: oom_kill rose); a NUMA node full under the policy 'bind' does this too"
            )
        return None


def _memory_cgroup(root: Path) -> tuple[Path | None, str, str]:
    """Return the directory of this process's memory cgroup and its file names, version 2 first."""
    v2 = ("memory.events", "memory.max")
    v1 = ("memory.oom_control", "memory.limit_in_bytes")
    mounted = root / "sys/fs/cgroup"
    candidates: list[tuple[Path, str, str]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            candidates.append((mounted / path.lstrip("/"), *v2))
        elif "memory" in controllers.split(","):
            # In a container the path is the host's while the mount shows the own group as its root.
            candidates += [(mounted / "memory" / path.lstrip("/"), *v1), (mounted / "memory", *v1)]
    candidates.append((mounted, *v2))
    for directory, counter, limit in candidates:
        if (directory / counter).is_file():
            return directory, counter, limit
    return None, "", ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _counter(path: Path) -> int | None:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None


def _limit(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED_BYTES else None
