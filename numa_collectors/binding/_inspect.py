"""Reading back what holds: masks of every thread, policy, and where the private pages are."""

from __future__ import annotations

import errno as _errno
import os
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from numa_collectors import _mempolicy, _nodes
from numa_collectors._cpulist import format_cpulist, parse_cpulist
from numa_collectors.binding._apply import first_touch_is_local, same_policy
from numa_collectors.binding._ladder import refusal_code
from numa_collectors.binding._request import LOCAL_ENOUGH, BindReport, BindRequest, Drift, Rung, Stray, policy_words

__all__ = ["inspect", "recheck"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# Bounds of one look: entries of pagemap read (8 bytes each), and pages asked after; together below 10 ms.
_MAX_ENTRIES = 1 << 16
_MAX_PAGES = 1 << 12
_WINDOW_PAGES = 256
# Documentation/admin-guide/mm/pagemap.rst: bit 63 present, bit 61 file-mapped or shared anonymous.
_PRESENT, _SHARED = 1 << 63, 1 << 61

_MODES = {
    "default": _mempolicy.MPOL_DEFAULT,
    "prefer": _mempolicy.MPOL_PREFERRED,
    "bind": _mempolicy.MPOL_BIND,
    "interleave": _mempolicy.MPOL_INTERLEAVE,
    "local": _mempolicy.MPOL_LOCAL,
    "prefer (many)": _mempolicy.MPOL_PREFERRED_MANY,
}
# mm/mempolicy.c: mpol_to_str; "prefer (many)" has a space, flags follow "=", nodes follow ":".
_POLICY = re.compile(r"[0-9a-f]+ (prefer \(many\)|[a-z]+(?: [a-z]+)*?)(?:=[a-z|]+)?(?::([0-9,-]+))?(?: |$)")


def parse_policy(line: str) -> tuple[int, tuple[int, ...]] | None:
    """Return mode and nodes of a line of ``numa_maps``; None for a policy of a kernel to come."""
    match = _POLICY.match(line.rstrip("\n"))
    if match is None or match[1] not in _MODES:
        return None
    return _MODES[match[1]], parse_cpulist(match[2] or "")


@dataclass(frozen=True)
class _Threads:
    main_cpus: tuple[int, ...] | None
    masks: Mapping[int, tuple[int, ...]]


def _threads(pid: int) -> _Threads:
    masks: dict[int, tuple[int, ...]] = {}
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            masks[int(name)] = tuple(sorted(os.sched_getaffinity(int(name))))
        except ProcessLookupError:
            continue  # the thread ended between the listing and the question
    return _Threads(masks.get(pid), masks)


def _thread_name(pid: int, tid: int) -> str:
    try:
        with open(f"/proc/{pid}/task/{tid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "ended"


def _policy(pid: int, own: bool) -> tuple[tuple[int, tuple[int, ...]] | None, int | None]:
    """Return the policy and the errno of a refusal; ``numa_maps`` answers where the call cannot."""
    number: int | None = None
    if own:
        try:
            return _mempolicy.get_mempolicy(), None
        except OSError as error:
            number = error.errno
    try:
        with open(f"/proc/{pid}/numa_maps", encoding="ascii", errors="replace", buffering=4096) as lines:
            return parse_policy(lines.readline()), number
    except OSError as error:
        return None, number or error.errno


def _private_ranges(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the private writable mappings; those of files hold copied pages too."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, modes, _ = line.split(" ", 2)
            if modes.startswith("rw") and modes.endswith("p"):
                start, _, end = span.partition("-")
                yield int(start, 16), int(end, 16)


def _windows(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield (address, pages): everything, or evenly spread windows of it where that would be too much."""
    total = sum(end - start for start, end in ranges) // _PAGE_BYTES
    stride = max(1, -(-total // _MAX_ENTRIES)) * _WINDOW_PAGES
    for start, end in ranges:
        first, last = start // _PAGE_BYTES, end // _PAGE_BYTES
        for page in range(first, last, stride):
            yield page * _PAGE_BYTES, min(_WINDOW_PAGES, last - page)


def _sampled_addresses() -> list[int]:
    """Return addresses of private pages of this process that exist, by ``/proc/self/pagemap``."""
    addresses: list[int] = []
    descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for address, num_pages in _windows(list(_private_ranges(os.getpid()))):
            entries = os.pread(descriptor, 8 * num_pages, address // _PAGE_BYTES * 8)
            for index, (entry,) in enumerate(struct.iter_unpack("Q", entries)):
                if entry & _PRESENT and not entry & _SHARED:
                    addresses.append(address + index * _PAGE_BYTES)
    finally:
        os.close(descriptor)
    return addresses[:: -(-len(addresses) // _MAX_PAGES) or 1]


@dataclass(frozen=True)
class _Pages:
    per_node: Mapping[int, int]
    unknown: int
    evidence: str


def _own_pages() -> _Pages | None:
    try:
        addresses = _sampled_addresses()
        statuses = _mempolicy.move_pages_status(addresses)
    except OSError:
        return None
    per_node: dict[int, int] = {}
    for status in statuses:
        if status >= 0:
            per_node[status] = per_node.get(status, 0) + 1
    return _Pages(per_node, len(statuses) - sum(per_node.values()), "move_pages") if addresses else None


def _pages_by_numa_maps(pid: int) -> _Pages:
    """Count the anonymous pages of a process; mappings of files are left out: their counts mix in the page cache."""
    per_node: dict[int, int] = {}
    try:
        with open(f"/proc/{pid}/numa_maps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                words = line.split()
                if any(word.startswith("file=") for word in words) or not any(w.startswith("anon=") for w in words):
                    continue
                for word in words:
                    name, equals, count = word.partition("=")
                    if equals and name[:1] == "N" and name[1:].isdigit() and count.isdigit():
                        per_node[int(name[1:])] = per_node.get(int(name[1:]), 0) + int(count)
    except OSError:
        return _Pages({}, 0, "none")
    return _Pages(per_node, 0, "numa_maps" if per_node else "none")


def _expected_nodes(request: BindRequest) -> tuple[int, ...]:
    if request.memory_nodes is not None:
        return request.memory_nodes
    return _nodes.nodes_of_cpus(request.cpus or ()) or _nodes.memory_nodes()


def _strays(pid: int, request: BindRequest, threads: _Threads) -> tuple[Stray, ...]:
    if not request.wants_cpus or request.cpus is None:
        return ()
    return tuple(
        Stray(tid, _thread_name(pid, tid), mask)
        for tid, mask in sorted(threads.masks.items())
        if not set(mask) <= set(request.cpus)
    )


def _rung(request: BindRequest, cpus_hold: bool, policy_holds: bool) -> Rung:
    if policy_holds and (cpus_hold or not request.wants_cpus):
        return "policy+cpu"
    if not cpus_hold:
        return "none"
    return "cpu+first-touch" if request.wants_policy and first_touch_is_local(request) else "cpu"


def inspect(request: BindRequest, pid: int | None = None) -> BindReport:
    """Return what holds of ``request`` for the calling process, read from the kernel in about 10 ms; changes nothing.

    With ``pid`` another process of the same user is looked at, by ``/proc`` alone.  Raises ``ProcessLookupError`` if it
    is gone.  Nothing that could not be read counts as a yes.
    """
    own = pid is None or pid == os.getpid()
    target = os.getpid() if pid is None else pid
    if not sys.platform.startswith("linux"):
        return BindReport(request, reason=f"{sys.platform} shows no binding", code="platform-unsupported")
    try:
        threads = _threads(target)
    except FileNotFoundError:
        raise ProcessLookupError(_errno.ESRCH, f"no process {target}") from None
    policy, number = _policy(target, own)
    pages = _Pages({}, 0, "none")
    if request.target != "none":
        pages = (_own_pages() if own else None) or _pages_by_numa_maps(target)
    strays = _strays(target, request, threads)
    cpus_hold = bool(request.wants_cpus and request.cpus and set(threads.main_cpus or (-1,)) <= set(request.cpus))
    policy_holds = request.wants_policy and policy is not None and same_policy(request.kernel_policy(), policy)
    applied = _rung(request, cpus_hold, policy_holds)
    expected = _expected_nodes(request)
    known, local = sum(pages.per_node.values()), sum(pages.per_node.get(node, 0) for node in expected)
    reasons = list(_reasons(request, threads, policy, number, pages, strays))
    if known and local < LOCAL_ENOUGH * known:
        reasons.append(f"{known - local} of {known} pages are away from node {format_cpulist(expected)}")
    code = None if applied == request.target and not strays else _code(request, cpus_hold, policy_holds, number)
    return BindReport(
        requested=request,
        applied=applied,
        verified=applied != "none" and not strays and known > 0 and local >= LOCAL_ENOUGH * known,
        reason="; ".join(reasons) or None,
        errno=number if code in ("mempolicy-refused", "mempolicy-missing") else None,
        code=code,
        cpus=threads.main_cpus,
        policy=None if policy is None else _mempolicy.policy_name(policy[0]),
        policy_nodes=() if policy is None else policy[1],
        num_threads_checked=len(threads.masks),
        pages_on_node=local if pages.evidence != "none" else 0,
        pages_total=known,
        pages_unknown=pages.unknown,
        pages_per_node=dict(sorted(pages.per_node.items())),
        evidence=pages.evidence,
        nodes_allowed=_nodes.allowed_nodes(pid=target),
        strays=strays,
    )


def _code(request: BindRequest, cpus_hold: bool, policy_holds: bool, number: int | None) -> str:
    if request.wants_cpus and not cpus_hold:
        return "affinity-trimmed"
    if request.wants_policy and not policy_holds:
        return refusal_code(number) if number is not None else "policy-not-applied"
    return "threads-astray"


def _reasons(
    request: BindRequest,
    threads: _Threads,
    policy: tuple[int, tuple[int, ...]] | None,
    number: int | None,
    pages: _Pages,
    strays: tuple[Stray, ...],
) -> Iterator[str]:
    if request.target == "none":
        yield "binding is off" if request.mode == "off" else "nothing was asked for"
        return
    if request.wants_cpus and not set(threads.main_cpus or (-1,)) <= set(request.cpus or ()):
        asked, held = format_cpulist(request.cpus or ()), format_cpulist(threads.main_cpus or ())
        yield f"CPUs {asked} were asked for, {held} hold"
    if request.wants_policy and policy is None:
        yield f"the memory policy cannot be read ({os.strerror(number)})" if number else "the memory policy is unknown"
    elif request.wants_policy and policy is not None and not same_policy(request.kernel_policy(), policy):
        yield f"memory policy {policy_words(request.kernel_policy())} was asked for, {policy_words(policy)} holds"
    yield from (str(stray) for stray in strays[:4])
    if pages.evidence == "none":
        yield "pages unverified: neither move_pages nor numa_maps can be read here"


def recheck(request: BindRequest, since: BindReport, pid: int | None = None) -> tuple[Drift, ...]:
    """Return what no longer is as ``since`` saw it, each with old and new: masks, policy, allowed nodes, pages.

    Numerical libraries reset masks of the threads that load them; a cpuset that shrinks narrows masks, rewrites
    policies and migrates pages, and restores none of them when it grows back.
    """
    return tuple(_drifts(since, inspect(request, pid), os.getpid() if pid is None else pid))


def _drifts(since: BindReport, now: BindReport, pid: int) -> Iterator[Drift]:
    request = now.requested
    if request.target == "none" or not sys.platform.startswith("linux"):
        return
    before_cpus, now_cpus = format_cpulist(since.cpus or ()), format_cpulist(now.cpus or ())
    if request.wants_cpus and before_cpus != now_cpus:
        yield Drift("affinity", "main thread", f"CPUs {before_cpus}", f"CPUs {now_cpus}")
    named = {(stray.tid, stray.cpus) for stray in since.strays}
    for stray in now.strays:
        if stray.tid != pid and (stray.tid, stray.cpus) not in named:
            what = f"thread {stray.tid} ({stray.name})"
            yield Drift("affinity", what, f"CPUs {before_cpus}", f"CPUs {format_cpulist(stray.cpus)}")
    if request.wants_policy and (since.policy, since.policy_nodes) != (now.policy, now.policy_nodes):
        yield Drift("policy", "memory policy", _policy_words(since), _policy_words(now))
    if since.nodes_allowed != now.nodes_allowed:
        before_nodes, now_nodes = (format_cpulist(report.nodes_allowed or ()) for report in (since, now))
        yield Drift("nodes", "allowed NUMA nodes", before_nodes, now_nodes)
    before_share, now_share = since.local_fraction, now.local_fraction
    if before_share is not None and now_share is not None and before_share >= LOCAL_ENOUGH > now_share:
        yield Drift("pages", "private pages on their nodes", f"{100 * before_share:.1f} %", f"{100 * now_share:.1f} %")


def _policy_words(report: BindReport) -> str:
    return f"{report.policy or 'unknown'}:{format_cpulist(report.policy_nodes)}".rstrip(":")
