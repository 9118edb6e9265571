"""Nothing may be left behind.

Children, descriptors, shared-memory names, affinity and memory policy are compared around every test.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LINUX = sys.platform == "linux"
MACHINES = Path(__file__).resolve().parents[2] / "shared" / "machines"


# A shell without job control starts what runs in the background with SIGINT ignored, and every process of a test would inherit
# that; here as in a terminal, Ctrl-C interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _children() -> set[int]:
    """Return the pids of this process's direct children, from every thread's children file."""
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.update(int(pid) for pid in (task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended since it was listed; its children moved to another thread
            continue
    return pids - _helpers()


def _helpers() -> set[int]:
    """Return the pid of multiprocessing's resource tracker: one long-lived process per interpreter, by design."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    pid = getattr(tracker, "_pid", None)
    return set() if pid is None else {pid}


def _descriptors() -> dict[int, str]:
    """Return open descriptors and what they lead to, less the resource tracker's pipe."""
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    tracker_fd = getattr(tracker, "_fd", None)
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if int(name) != tracker_fd:
            found[int(name)] = target
    return found


def _policy() -> tuple[int, int]:
    """Return (mode, first 64 nodes) of the calling thread's memory policy by the raw system call."""
    number = {"x86_64": 239, "aarch64": 236}.get(os.uname().machine)
    if number is None:
        return (0, 0)
    mode, mask = ctypes.c_int(0), (ctypes.c_ulong * 1024)()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(ctypes.c_long(number), ctypes.byref(mode), mask, ctypes.c_ulong(1024 * 64), None, ctypes.c_ulong(0))
    return (mode.value, mask[0])


def _shm_names() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def _used_elsewhere(name: str) -> bool:
    """Return whether another process maps the name: then it is that one's, and not something that a test left."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if maps.parent.name != str(os.getpid()) and f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:  # the process has ended since it was listed, or is another user's
            continue
    return False


def _live_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.daemon}


def _left(children: set[int], descriptors: set[int], threads: set[str]) -> tuple[set[int], dict[int, str], set[str]]:
    """Return what there is now and was not before."""
    opened = {fd: target for fd, target in _descriptors().items() if fd not in descriptors}
    return _children() - children, opened, _live_threads() - threads


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    if not LINUX:
        yield
        return
    affinity, policy, names = os.sched_getaffinity(0), _policy(), _shm_names()
    before_children, before_fds, before_threads = _children(), set(_descriptors()), _live_threads()
    yield
    # A process that was waited for may need a moment until its pipes are collected; the bound is no measurement.
    deadline = time.monotonic() + 2.0
    children, descriptors, threads = _left(before_children, before_fds, before_threads)
    while (children or descriptors or threads) and time.monotonic() < deadline:
        multiprocessing.active_children()
        gc.collect()
        threading.Event().wait(0.02)
        children, descriptors, threads = _left(before_children, before_fds, before_threads)
    assert not children, f"child processes left behind: {sorted(children)}"
    assert not descriptors, f"descriptors left open: {descriptors}"
    assert not threads, f"threads left running: {sorted(threads)}"
    left = {name for name in _shm_names() - names if not _used_elsewhere(name)}
    assert not left, f"names left in /dev/shm: {sorted(left)}"
    assert os.sched_getaffinity(0) == affinity, "the test changed the affinity of its process"
    assert _policy() == policy, "the test changed the memory policy of its thread"


@pytest.fixture(scope="session")
def machines() -> Path:
    """Return the folder of real machines' snapshots beside the repository; skip where it is absent."""
    if not MACHINES.is_dir():
        pytest.skip(f"needs the snapshots of real machines at {MACHINES}, which is not there")
    return MACHINES
