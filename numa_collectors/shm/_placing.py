"""The steps that put a region's pages on a node: plan, bind, prefault, look up.

Order is the whole point: a policy set after the first touch, or an allocation before the policy, would place nothing.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from numa_collectors import _mempolicy, _nodes
from numa_collectors._cpulist import format_cpulist
from numa_collectors.errors import BindingError, NodeCapacityError

__all__ = ["HUGE_PAGE_BYTES", "PAGE_BYTES", "Plan", "RegionPolicy", "RegionReport", "check", "place", "report"]

RegionPolicy = Literal["bind", "preferred", "none"]

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 << 20
# include/uapi/asm-generic/mman-common.h
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
# A query of a quarter million pages takes about 20 ms; of a larger region that many are looked at, evenly spread.
_MAX_PAGES_QUERIED = 1 << 18


@dataclass(frozen=True)
class RegionReport:
    """Where a region's pages are.

    ``method``: how they got there (``"mbind"``, ``"first-touch"``, ``"none"``, ``"attached"``); ``evidence``: how that
    was looked up (``"move_pages"``, ``"numa_maps"``, ``"none"``).  ``pages_per_node`` counts the pages looked at,
    ``pages_unknown`` those of them that the kernel had no answer for, ``pages_total`` all pages of the region.
    ``verified`` is True only if every page looked at is on ``node``; ``reason`` says in words why it is not, or what
    was stepped down.
    """

    node: int | None
    pages_per_node: Mapping[int, int]
    pages_total: int
    method: str
    verified: bool
    reason: str | None
    evidence: str = "none"
    pages_unknown: int = 0
    huge_page_bytes: int = 0
    errno: int | None = None

    @property
    def local_fraction(self) -> float | None:
        """Share of the pages with a known place that are on ``node``; None where nothing is known or asked."""
        known = sum(self.pages_per_node.values())
        return None if self.node is None or not known else self.pages_per_node.get(self.node, 0) / known

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values, for logs and JSON."""
        return asdict(self)


@dataclass
class Plan:
    """What was asked for, and what became of it while the region was made."""

    node: int | None
    policy: RegionPolicy
    toucher_cpus: tuple[int, ...] | None
    method: str = "none"
    reasons: list[str] = field(default_factory=list)
    errno: int | None = None


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int

    def call(address: int, length: int, advice: int) -> int:
        return 0 if function(address, length, advice) == 0 else ctypes.get_errno() or errno.EIO

    return call


def open_anonymous(name: str) -> int:
    """Return a descriptor of an empty file that has no name, closed on exec."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if sys.platform == "win32":
        raise BindingError(
            f"expected a POSIX system for shared regions, got {sys.platform}; use Linux (or WSL 2), or the trainer's "
            "inline mode, which shares nothing",
            code="shared-memory-unsupported",
        )
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")
    os.unlink(path)
    return descriptor


def seal_size(descriptor: int) -> None:
    """Forbid every later change of size: a shorter file would be SIGBUS for whoever maps it."""
    if not hasattr(os, "memfd_create"):
        return
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def address_of(mapping: mmap.mmap) -> int:
    anchor = ctypes.c_char.from_buffer(mapping)
    return ctypes.addressof(anchor)


def populate(mapping: mmap.mmap, *, create: bool) -> None:
    """Fill this process's page tables, with ``create`` also the file's holes.

    Without ``create`` nothing is ever written: others may be using the region.  Raises ``NodeCapacityError``.
    """
    length = len(mapping)
    number = errno.EINVAL
    if sys.platform.startswith("linux"):
        number = _madvise()(address_of(mapping), length, _MADV_POPULATE_WRITE)
    if number == 0:
        return
    if number == errno.EINVAL:
        # Linux before 5.14 has no populate advice, other systems neither: one access a page does the same.
        with memoryview(mapping) as view, view[::PAGE_BYTES] as pages:
            if create:
                pages[:] = bytes(len(pages))
            else:
                bytes(pages)
        return
    raise NodeCapacityError(
        f"need {_nodes.format_bytes(length)}, but the kernel had no pages for it ({os.strerror(number)}); "
        "use smaller rings, or lift the limit of memory"
    )


def _in_thread_on(cpus: tuple[int, ...], action: Callable[[], None]) -> OSError | None:
    """Run ``action`` in a throwaway thread pinned to ``cpus``; return why it could not be pinned, if it could not.

    The action runs in any case; its errors are raised here.  The caller's own mask never changes.
    """
    refused: list[OSError] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            refused.append(error)
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - carried over to the calling thread and raised there
            failed.append(error)

    thread = threading.Thread(target=body, name="numa-collectors-toucher", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return refused[0] if refused else None


def check(name: str, size_bytes: int, plan: Plan) -> None:
    """Raise ``BindingError`` or ``NodeCapacityError`` for what cannot be had; nothing is allocated yet."""
    if plan.node is not None and plan.policy != "none":
        _nodes.check_nodes((plan.node,))
    only = plan.node if plan.policy == "bind" else None
    place = "this process's NUMA nodes" if only is None else f"node {only}"
    room = (place, _nodes.node_headroom_bytes(only))
    _nodes.check_room(f"region {name!r}", size_bytes, room, _nodes.cgroup_place())


def _bind(mapping: mmap.mmap, plan: Plan) -> None:
    """Set the file's policy while it has no page; on a refusal leave the placing to the first touch."""
    if plan.node is None or plan.policy == "none":
        return
    mode = _mempolicy.MPOL_BIND if plan.policy == "bind" else _mempolicy.MPOL_PREFERRED
    address = address_of(mapping)
    try:
        _mempolicy.mbind(address, len(mapping), mode, (plan.node,))
    except OSError as error:
        plan.errno = error.errno
        plan.reasons.append(f"mbind refused ({error.strerror}): placed by pinned first touch instead")
        return
    try:
        seen = _mempolicy.get_mempolicy(address)
    except OSError as error:
        plan.reasons.append(f"the policy could not be read back ({error.strerror})")
        seen = (mode, (plan.node,))
    if seen == (mode, (plan.node,)):
        plan.method = "mbind"
    else:
        shown = f"{_mempolicy.policy_name(seen[0])}:{format_cpulist(seen[1])}"
        plan.reasons.append(f"mbind reported success, but the policy is {shown}")


def _toucher_cpus(plan: Plan) -> tuple[int, ...]:
    """Return the CPUs that the first touch may come from; never one outside the calling thread's mask."""
    if plan.toucher_cpus is None and (plan.node is None or plan.method == "mbind" or plan.policy == "none"):
        return ()
    wanted = _nodes.node_cpus(plan.node) if plan.toucher_cpus is None and plan.node is not None else plan.toucher_cpus
    cpus = tuple(sorted(set(wanted or ()) & os.sched_getaffinity(0)))
    if not cpus and plan.method != "mbind":
        asked = format_cpulist(wanted or ()) or f"those of node {plan.node}"
        plan.reasons.append(f"no first touch from CPUs {asked}: none of them is in this thread's mask")
    return cpus


def _prefault(mapping: mmap.mmap, plan: Plan) -> None:
    cpus = _toucher_cpus(plan) if hasattr(os, "sched_setaffinity") else ()
    if not cpus:
        populate(mapping, create=True)
        return
    refused = _in_thread_on(cpus, functools.partial(populate, mapping, create=True))
    if refused is not None:
        plan.errno = plan.errno or refused.errno
        plan.reasons.append(f"the toucher could not be pinned ({refused.strerror})")
    elif plan.method != "mbind":
        plan.method = "first-touch"


def _numa_maps(address: int, length: int) -> dict[int, int]:
    """Return pages per node of the mappings that begin in the range; empty where ``numa_maps`` cannot be read."""
    counts: dict[int, int] = {}
    try:
        with open("/proc/self/numa_maps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                start, _, rest = line.partition(" ")
                if address <= int(start, 16) < address + length:
                    for word in rest.split():
                        name, equals, value = word.partition("=")
                        if equals and name[:1] == "N" and name[1:].isdigit() and value.isdigit():
                            counts[int(name[1:])] = counts.get(int(name[1:]), 0) + int(value)
    except (OSError, ValueError):
        return {}
    return counts


def _look_up(mapping: mmap.mmap) -> tuple[dict[int, int], int, str]:
    """Return pages per node, the number of unknown ones, and the kind of evidence."""
    address, length = address_of(mapping), len(mapping)
    num_pages = length // PAGE_BYTES
    step = -(-num_pages // _MAX_PAGES_QUERIED)
    addresses = array("Q", range(address, address + length, PAGE_BYTES * step))
    try:
        statuses = _mempolicy.move_pages_status(addresses)
    except OSError:
        counts = _numa_maps(address, length)
        return counts, max(0, num_pages - sum(counts.values())), "numa_maps" if counts else "none"
    counts = {}
    for status in statuses:
        counts[status] = counts.get(status, 0) + 1
    known = {node: count for node, count in sorted(counts.items()) if node >= 0}
    return known, len(statuses) - sum(known.values()), "move_pages"


def _huge_page_bytes(address: int) -> int:
    """Return how much of the mapping at ``address`` is mapped by huge pages, by ``/proc/self/smaps``."""
    inside = False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line[:1] in "0123456789abcdef":
                    inside = int(line.partition("-")[0], 16) == address
                elif inside and line.startswith("ShmemPmdMapped:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _verdict(plan: Plan, known: Mapping[int, int], unknown: int, evidence: str) -> tuple[bool, list[str]]:
    reasons = list(plan.reasons)
    if plan.node is None:
        return False, [*reasons, "no node was asked for"]
    if evidence == "none":
        return False, [*reasons, "unverified: neither move_pages nor numa_maps can be read here"]
    elsewhere = {node: count for node, count in known.items() if node != plan.node}
    if elsewhere:
        places = ", ".join(f"{count} on node {node}" for node, count in elsewhere.items())
        reasons.append(f"pages away from node {plan.node}: {places}")
    if unknown:
        reasons.append(f"{unknown} pages have no known place")
    return bool(known) and not elsewhere and not unknown, reasons


def place(mapping: mmap.mmap, plan: Plan, *, huge_pages: bool) -> None:
    """Bind and prefault: from here on every page of ``mapping`` exists."""
    _bind(mapping, plan)
    if huge_pages:
        linux = sys.platform.startswith("linux")
        number = _madvise()(address_of(mapping), len(mapping), _MADV_HUGEPAGE) if linux else errno.EINVAL
        if number != 0:
            plan.reasons.append(f"no huge pages ({os.strerror(number)})")
    _prefault(mapping, plan)


def report(mapping: mmap.mmap, plan: Plan, *, huge_pages: bool) -> RegionReport:
    """Look at the pages of ``mapping`` and say where they are."""
    known, unknown, evidence = _look_up(mapping)
    if unknown and evidence != "none":
        # Reclaim may have taken pages out of this process's page tables; mapping them again makes them countable.
        populate(mapping, create=False)
        known, unknown, evidence = _look_up(mapping)
    verified, reasons = _verdict(plan, known, unknown, evidence)
    huge_bytes = _huge_page_bytes(address_of(mapping)) if huge_pages else 0
    if huge_pages and not huge_bytes:
        reasons.append("no huge page is mapped (see /sys/kernel/mm/transparent_hugepage/shmem_enabled)")
    return RegionReport(
        node=plan.node,
        pages_per_node=known,
        pages_total=len(mapping) // PAGE_BYTES,
        method=plan.method,
        verified=verified,
        reason="; ".join(reasons) or None,
        evidence=evidence,
        pages_unknown=unknown,
        huge_page_bytes=huge_bytes,
        errno=plan.errno,
    )
