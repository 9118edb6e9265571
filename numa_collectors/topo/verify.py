"""Where a running process really is: its threads' masks and policies, and the node of each of its pages.

Sources: proc(5) for ``/proc/PID/task/TID/status`` and ``numa_maps``; the policy names are those of ``mpol_to_str`` in
the kernel's mm/mempolicy.c, one of which has a space in it: ``prefer (many):0-1``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from numa_collectors._cpulist import format_cpulist, parse_cpulist
from numa_collectors.errors import TopologyError
from numa_collectors.topo.files import Root
from numa_collectors.topo.model import Topology

__all__ = ["Mapping", "ProcessReport", "ThreadReport", "parse_numa_maps", "verify_process"]

_FIELD = r"(?:file=|heap\b|stack\b|huge\b|anon=|dirty=|mapped=|mapmax=|swapcache=|active=|writeback=|N\d+=|kernelpagesize_kB=)"
_LINE = re.compile(rf"^(?P<address>[0-9a-f]+) (?P<policy>.+?)(?:\s+(?P<rest>{_FIELD}.*))?$")
_PAGES = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_SIZE = re.compile(r"\bkernelpagesize_kB=(\d+)")
_SHARED = re.compile(r"\bfile=(?:/memfd:|/dev/shm/|/dev/zero|/SYSV|anon_hugepage|/anon_hugepage)")
# Up to this share of private pages elsewhere is what shared libraries' copies and the page allocator leave by chance.
_STRAY_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of numa_maps.  ``kind`` is ``private``, ``shared`` (memfd, shm) or ``file`` (the page cache's)."""

    policy: str
    kind: str
    bytes_by_node: dict[int, int]


@dataclass(frozen=True, slots=True)
class ThreadReport:
    """``policy`` is None where numa_maps cannot be read."""

    tid: int
    name: str
    cpus: tuple[int, ...]
    policy: str | None


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What was found; ``bytes_by_node`` by kind of mapping, ``findings`` what is not as a bound process has it."""

    pid: int
    name: str
    threads: tuple[ThreadReport, ...]
    bytes_by_node: dict[str, dict[int, int]]
    policies: dict[str, int]
    pages_known: bool
    findings: tuple[str, ...]

    def render(self) -> str:
        """Return the report as text."""
        lines = [f"process {self.pid} ({self.name}), {len(self.threads)} threads"]
        masks: dict[tuple[tuple[int, ...], str | None], list[ThreadReport]] = {}
        for thread in self.threads:
            masks.setdefault((thread.cpus, thread.policy), []).append(thread)
        for (cpus, policy), threads in masks.items():
            who = ", ".join(f"{thread.tid} {thread.name}" for thread in threads[:4])
            who += f" and {len(threads) - 4} more" if len(threads) > 4 else ""
            lines.append(f"  CPUs {format_cpulist(cpus)}  policy {policy or 'unknown'}  threads {who}")
        if not self.pages_known:
            lines.append("  pages: unverified, this kernel has no numa_maps")
        for kind, by_node in self.bytes_by_node.items():
            total = sum(by_node.values())
            if total:
                shares = ", ".join(
                    f"node {node} {count / total:.1%} ({count >> 10} KiB)" for node, count in sorted(by_node.items())
                )
                lines.append(f"  {kind} pages: {shares}")
        if self.policies:
            lines.append("  policies of mappings: " + ", ".join(f"{name} x{n}" for name, n in self.policies.items()))
        lines += [f"! {finding}" for finding in self.findings]
        return "\n".join(lines)


def parse_numa_maps(text: str) -> list[Mapping]:
    """Return the mappings of a numa_maps file; lines that are none are skipped."""
    mappings = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        rest = match["rest"] or ""
        size = _PAGE_SIZE.search(rest)
        page_bytes = int(size.group(1)) * 1024 if size else 4096
        pages = {int(node): int(count) * page_bytes for node, count in _PAGES.findall(rest)}
        kind = "shared" if _SHARED.search(rest) else "file" if "file=" in rest and "anon=" not in rest else "private"
        mappings.append(Mapping(match["policy"], kind, pages))
    return mappings


def verify_process(topology: Topology, pid: int, root: str = "/") -> ProcessReport:
    """Return where process ``pid`` is; ``TopologyError`` where it is gone or may not be looked at."""
    files = Root(root)
    process = f"proc/{pid}"
    tids = files.numbered(f"{process}/task", "")
    threads = [report for tid in tids if (report := _thread(files, process, tid)) is not None]
    if not threads:
        raise TopologyError(f"expected the PID of a running process, got {pid}: there is none, or it is another user's")
    text = files.read(f"{process}/numa_maps")
    if text is None and files.problems:
        raise TopologyError(
            f"process {pid} may not be looked at ({files.problems[0]}): run as its user, or with CAP_SYS_PTRACE"
        )
    mappings = parse_numa_maps(text or "")
    by_node: dict[str, dict[int, int]] = {"private": {}, "shared": {}, "file": {}}
    for mapping in mappings:
        kind = by_node[mapping.kind]
        for node, count in mapping.bytes_by_node.items():
            kind[node] = kind.get(node, 0) + count
    return ProcessReport(
        pid,
        files.read(f"{process}/comm") or "?",
        tuple(threads),
        by_node,
        dict(Counter(mapping.policy for mapping in mappings).most_common()),
        text is not None,
        tuple(_findings(topology, threads, by_node["private"])),
    )


def _thread(files: Root, process: str, tid: int) -> ThreadReport | None:
    status = files.read(f"{process}/task/{tid}/status")
    if status is None:
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    cpus = parse_cpulist(fields.get("Cpus_allowed_list", "").strip())
    # A thread's own policy shows in its numa_maps on every mapping that has none itself, which most have not.
    policies = Counter(
        mapping.policy for mapping in parse_numa_maps(files.read(f"{process}/task/{tid}/numa_maps") or "")
    )
    policy = policies.most_common(1)[0][0] if policies else None
    return ThreadReport(tid, fields.get("Name", "?").strip(), cpus, policy)


def _findings(topology: Topology, threads: list[ThreadReport], private: dict[int, int]) -> Iterable[str]:
    main = threads[0]
    drifted = [thread for thread in threads if thread.cpus != main.cpus]
    wider = [thread for thread in drifted if not set(thread.cpus) <= set(main.cpus)]
    if wider:
        who = ", ".join(f"{thread.tid} {thread.name} ({format_cpulist(thread.cpus)})" for thread in wider[:4])
        yield f"drift: the process is on CPUs {format_cpulist(main.cpus)}, but these threads reach beyond: {who}"
    nodes = {node for cpu in main.cpus if (node := topology.node_of_cpu(cpu)) is not None}
    if len(topology.numa_nodes) > 1 and len(nodes) > 1:
        yield f"not bound to a node: its CPUs are on nodes {format_cpulist(nodes)}"
    total = sum(private.values())
    stray = sum(count for node, count in private.items() if node not in nodes)
    if total and len(nodes) == 1 and topology.node(min(nodes)).memory_bytes and stray > _STRAY_SHARE * total:
        yield f"{stray / total:.1%} of its private pages are not on node {format_cpulist(nodes)}, where its CPUs are"
