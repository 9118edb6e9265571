"""Regions on a machine with one node: size, sharing, order, refusals, shortage, no leak."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from numa_collectors import _mempolicy, _nodes
from numa_collectors.errors import BindingError, NodeCapacityError
from numa_collectors.shm import Region, RegionReport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SPAWN = multiprocessing.get_context("spawn")
NODE = (_nodes.allowed_nodes() or (0,))[0]
PAGE = os.sysconf("SC_PAGE_SIZE")
DEADLINE_S = 30.0


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:")


def test_region_is_zeroed_page_aligned_and_verified_on_its_node() -> None:
    with Region.create("ring", 3 * PAGE + 5, node=NODE) as region:
        assert region.address % PAGE == 0
        assert len(region.buf) == region.size_bytes == 3 * PAGE + 5
        assert bytes(region.buf) == bytes(3 * PAGE + 5)
        report = region.report
        assert (report.method, report.evidence, report.verified, report.reason) == ("mbind", "move_pages", True, None)
        assert dict(report.pages_per_node) == {NODE: 4}
        assert (report.pages_total, report.pages_unknown, report.local_fraction) == (4, 0, 1.0)
        assert _mempolicy.get_mempolicy(region.address) == (_mempolicy.MPOL_BIND, (NODE,))
        region.buf[3 * PAGE + 4] = 7
        assert region.buf[-1] == 7


def test_every_page_exists_before_anybody_has_the_region() -> None:
    with Region.create("ring", 512 * PAGE, node=NODE) as region:
        assert os.fstat(region.fileno()).st_blocks * 512 == 512 * PAGE


@pytest.mark.parametrize(("policy", "mode"), [("bind", _mempolicy.MPOL_BIND), ("preferred", _mempolicy.MPOL_PREFERRED)])
def test_policy_is_on_the_file(policy: str, mode: int) -> None:
    with Region.create("ring", PAGE, node=NODE, policy=policy) as region:  # type: ignore[arg-type]
        other = Region.attach(os.open(f"/proc/self/fd/{region.fileno()}", os.O_RDWR), node=NODE)
        with other:
            assert _mempolicy.get_mempolicy(other.address) == (mode, (NODE,))
            assert other.verify().verified


def test_without_a_node_nothing_is_bound_and_nothing_verified() -> None:
    with Region.create("ring", 2 * PAGE) as region:
        report = region.report
        assert (report.method, report.verified) == ("none", False)
        assert report.reason == "no node was asked for"
        assert sum(report.pages_per_node.values()) == 2
        assert report.local_fraction is None
        assert _mempolicy.get_mempolicy(region.address)[0] == _mempolicy.MPOL_DEFAULT


def test_pinned_first_touch_on_request() -> None:
    mask = os.sched_getaffinity(0)
    cpu = max(mask)
    with Region.create("ring", 2 * PAGE, node=NODE, policy="none", toucher_cpus=(cpu,)) as region:
        assert region.report.method == "first-touch"
        assert region.report.verified
    assert os.sched_getaffinity(0) == mask


def test_toucher_outside_the_mask_is_named_and_not_a_false_yes() -> None:
    with Region.create("ring", PAGE, node=NODE, policy="none", toucher_cpus=(100_000,)) as region:
        assert region.report.method == "none"
        assert "100000" in str(region.report.reason)


def _child_side(region: Region, pipe: Connection) -> None:
    first = bytes(region.buf[:4])
    region.buf[4:8] = b"from"
    pipe.send((first, region.name, region.size_bytes, region.report, region.verify()))
    region.close()
    pipe.close()


def test_spawned_child_shares_the_pages_and_sees_them_on_the_node() -> None:
    ours, theirs = SPAWN.Pipe()
    with Region.create("ring[0]", 64 * PAGE, node=NODE) as region:
        region.buf[:4] = b"home"
        process = SPAWN.Process(target=_child_side, args=(region, theirs))
        process.start()
        theirs.close()
        assert ours.poll(DEADLINE_S)
        first, name, size, known, seen = ours.recv()
        process.join(DEADLINE_S)
        assert process.exitcode == 0
        assert (first, name, size) == (b"home", "ring[0]", 64 * PAGE)
        assert bytes(region.buf[4:8]) == b"from"
        assert known == region.report
        # The pages that the child sees without having touched one by itself.
        assert (seen.verified, seen.method, dict(seen.pages_per_node)) == (True, "attached", {NODE: 64})
    ours.close()


def test_third_process_reopens_by_descriptor_path(child: Callable[..., Any]) -> None:
    with Region.create("snapshot", 8 * PAGE, node=NODE) as region:
        region.buf[:5] = b"hello"
        found = child(f"""
import json, os
from numa_collectors.shm import Region
from numa_collectors import _mempolicy
descriptor = os.open("/proc/{os.getpid()}/fd/{region.fileno()}", os.O_RDWR)
with Region.attach(descriptor, node={NODE}) as region:
    report = region.verify()
    print(json.dumps([bytes(region.buf[:5]).decode(), report.verified, sum(report.pages_per_node.values()),
                      _mempolicy.get_mempolicy(region.address)]))
""")
        assert found == ["hello", True, 8, [_mempolicy.MPOL_BIND, [NODE]]]


def test_pickling_is_refused_except_for_a_child_that_is_being_spawned() -> None:
    with Region.create("ring", PAGE) as region, pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(region)


def test_report_travels() -> None:
    report = RegionReport(1, {1: 5, 0: 5}, 10, "mbind", False, "spilled")
    assert pickle.loads(pickle.dumps(report)) == report
    assert report.local_fraction == 0.5
    assert report.to_dict()["pages_per_node"] == {1: 5, 0: 5}


def test_close_waits_for_views_and_is_idempotent() -> None:
    region = Region.create("ring", PAGE, node=NODE)
    view = region.buf[8:16]
    with pytest.raises(BufferError, match="'ring' is still in use"):
        region.close()
    assert not region.closed
    view[0] = 3
    assert region.buf[8] == 3
    del view
    region.close()
    region.close()
    assert region.closed
    for use in (lambda: region.buf, lambda: region.address, region.verify, region.fileno):
        with pytest.raises(ValueError, match="is closed"):
            use()
    assert "closed" in repr(region)


def test_size_is_sealed() -> None:
    with Region.create("ring", 2 * PAGE) as region:
        for size in (PAGE, 4 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fileno(), size)


def test_attach_refuses_a_file_that_is_too_small_and_keeps_no_descriptor() -> None:
    before = num_descriptors()
    descriptor = os.memfd_create("small")
    os.ftruncate(descriptor, PAGE)
    with pytest.raises(ValueError, match="at least 8192"):
        Region.attach(descriptor, size_bytes=8192 if PAGE < 8192 else 2 * PAGE)
    assert num_descriptors() == before


def test_attach_writes_nothing() -> None:
    descriptor = os.memfd_create("holes")
    os.ftruncate(descriptor, 16 * PAGE)
    os.pwrite(descriptor, b"x", 5 * PAGE)
    with Region.attach(descriptor) as region:
        assert region.buf[5 * PAGE] == ord("x")
        assert sum(region.buf) == ord("x")


@pytest.mark.parametrize("size", [0, -1])
def test_size_must_be_positive(size: int) -> None:
    with pytest.raises(ValueError, match="positive size"):
        Region.create("ring", size)


def test_unknown_policy() -> None:
    with pytest.raises(ValueError, match="'bind', 'preferred' or 'none'"):
        Region.create("ring", PAGE, policy="membind")  # type: ignore[arg-type]


@pytest.mark.parametrize("node", [777, 5000])
@pytest.mark.parametrize("policy", ["bind", "preferred"])
def test_missing_node_is_an_error_with_a_code_and_leaves_nothing(node: int, policy: str) -> None:
    before = num_descriptors()
    with pytest.raises(BindingError, match=str(node)) as caught:
        Region.create("ring", PAGE, node=node, policy=policy)  # type: ignore[arg-type]
    assert caught.value.code == "node-missing"
    assert num_descriptors() == before


@pytest.mark.parametrize(("node", "policy"), [(NODE, "bind"), (NODE, "preferred"), (None, "bind")])
def test_shortage_is_said_before_anything_is_allocated(node: int | None, policy: str) -> None:
    before, resident = num_descriptors(), num_mappings()
    with pytest.raises(NodeCapacityError, match=r"region 'ring\[3\]' needs .*GiB, but .* left") as caught:
        Region.create("ring[3]", 1 << 45, node=node, policy=policy)  # type: ignore[arg-type]
    assert isinstance(caught.value, MemoryError)
    assert (num_descriptors(), num_mappings()) == (before, resident)


def test_nothing_leaks_over_many_regions() -> None:
    before, resident = num_descriptors(), num_mappings()
    for _ in range(50):
        with Region.create("ring", 16 * PAGE, node=NODE) as region:
            region.buf[0] = 1
    assert (num_descriptors(), num_mappings()) == (before, resident)


def test_dropping_a_region_unclosed_warns() -> None:
    region = Region.create("ring", PAGE)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del region


def test_huge_pages_are_asked_for_or_their_absence_said() -> None:
    with Region.create("ring", 3 << 20, node=NODE, huge_pages=True) as region:
        assert region.report.verified
        assert region.report.pages_total * PAGE == 4 << 20
        assert region.report.huge_page_bytes or "huge page" in str(region.report.reason)


REFUSED = """
import errno, json, os, kernel_filter
from numa_collectors.shm import Region
kernel_filter.refuse({error}, {calls})
mask = os.sched_getaffinity(0)
fds = len(os.listdir("/proc/self/fd"))
with Region.create("ring", 64 * {page}, node={node}) as region:
    report = region.report
assert os.sched_getaffinity(0) == mask and len(os.listdir("/proc/self/fd")) == fds
print(json.dumps(report.to_dict()))
"""


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_refused_policy_calls_step_down_to_pinned_first_touch(child: Callable[..., Any], error: int) -> None:
    report = child(REFUSED.format(error=error, calls="*kernel_filter.POLICY_CALLS", page=PAGE, node=NODE))
    assert report["method"] == "first-touch"
    assert report["evidence"] == "numa_maps"
    assert report["pages_per_node"] == {str(NODE): 64}
    assert report["verified"]
    assert report["errno"] == error
    assert "pinned first touch" in report["reason"]


def test_without_the_pinning_call_it_says_so(child: Callable[..., Any]) -> None:
    calls = "*kernel_filter.POLICY_CALLS, 'sched_setaffinity'"
    report = child(REFUSED.format(error=errno.EPERM, calls=calls, page=PAGE, node=NODE))
    assert report["method"] == "none"
    assert "could not be pinned" in report["reason"]


def test_kernel_without_populate_advice(child: Callable[..., Any]) -> None:
    report = child(REFUSED.format(error=errno.EINVAL, calls="'madvise'", page=PAGE, node=NODE))
    assert (report["method"], report["verified"]) == ("mbind", True)
    assert report["pages_per_node"] == {str(NODE): 64}


def test_a_kernel_that_shows_nothing_gets_no_false_yes(child: Callable[..., Any]) -> None:
    report = child(f"""
import errno, json, kernel_filter
from numa_collectors.shm import Region
with Region.create("first", {PAGE}, node={NODE}) as region:
    assert region.verify().verified
    kernel_filter.refuse(errno.EACCES, "openat", "move_pages")
    report = region.verify()
print(json.dumps(report.to_dict()))
""")
    assert report["verified"] is False
    assert report["evidence"] == "none"
    assert report["pages_per_node"] == {}
    assert "unverified" in report["reason"]


def test_no_pages_for_the_prefault_is_a_memory_error_and_no_leak(child: Any) -> None:
    found = child(f"""
import errno, json, os, kernel_filter
from numa_collectors.shm import Region
kernel_filter.refuse(errno.ENOMEM, "madvise")
fds = len(os.listdir("/proc/self/fd"))
try:
    Region.create("ring", 64 * {PAGE}, node={NODE})
except MemoryError as error:
    found = [type(error).__name__, str(error)]
print(json.dumps([*found, len(os.listdir("/proc/self/fd")) - fds]))
""")
    assert found[0] == "NodeCapacityError"
    assert "no pages" in found[1]
    assert found[2] == 0
    # Closed on purpose, not by the garbage collector, which would warn.
    assert child.log == ""


def test_other_posix_systems_use_an_unlinked_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with Region.create("ring", 2 * PAGE) as region:
        region.buf[0] = 9
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{region.fileno()}")
        with Region.attach(os.dup(region.fileno())) as other:
            assert other.buf[0] == 9


def test_windows_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(BindingError, match="inline mode") as caught:
        Region.create("ring", PAGE)
    assert caught.value.code == "shared-memory-unsupported"


def test_regions_from_several_threads_at_once() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                with Region.create("ring", 8 * PAGE, node=NODE) as region:
                    assert region.report.verified
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failed


@pytest.mark.parametrize("share", [1, 2])
def test_unknown_pages_are_neither_here_nor_elsewhere(monkeypatch: pytest.MonkeyPatch, share: int) -> None:
    with Region.create("ring", 8 * PAGE, node=NODE) as region:
        monkeypatch.setattr(
            _mempolicy,
            "move_pages_status",
            lambda addresses: [-errno.EFAULT if n % share == 0 else NODE for n in range(len(addresses))],
        )
        report = region.verify()
    assert not report.verified
    assert report.pages_unknown == 8 // share
    assert report.local_fraction == (None if share == 1 else 1.0)
    assert "no known place" in str(report.reason)
