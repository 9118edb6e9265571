"""Sleeping on a word of shared memory, and full memory fences, from plain Python.

Guarantees: :func:`futex_wait` sleeps only while the 32-bit word at an address holds the expected value; the
comparison and the falling asleep are one step for the kernel, so a :func:`futex_wake` made after the word changed is
never lost.  The fence of :func:`make_fence` orders every earlier access of the calling thread before every later one,
stores before loads included.

Assumes: the word lies in shared memory that is mapped by every party (the futex is keyed by inode and offset,
futex(2)). On x86-64 taking and releasing an uncontended lock executes a ``lock``-prefixed instruction, which is a
full fence (Intel SDM vol. 3, 9.2.5; AMD APM vol. 2, 7.4.2).  Elsewhere the fence is
``membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED)``: the kernel executes ``smp_mb()`` in the caller before and after it
interrupts anybody (kernel/sched/membarrier.c).  The private command would not do: it returns without any fence when
the caller has a single thread.

Not covered: 32-bit kernels.  Without futexes (other systems than Linux) waits poll every half millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

__all__ = [
    "FENCE_AVAILABLE",
    "FUTEX_AVAILABLE",
    "FUTEX_WAITV_MAX",
    "STORE_ORDER_STRONG",
    "full_fence",
    "futex_wait",
    "futex_waitv",
    "futex_waitv_available",
    "futex_wake",
    "make_fence",
    "require_fence",
]

_MACHINE = platform.machine().lower()
_X86 = _MACHINE in ("x86_64", "amd64")

STORE_ORDER_STRONG = _X86
"""True where stores are not reordered with stores nor loads with loads (x86-64)."""

_LINUX_64 = sys.platform == "linux" and sys.maxsize > 2**32

# Numbers of futex(2) and membarrier(2), from the kernel's syscall tables; futex_waitv(2) has one number everywhere.
_SYSCALLS = {
    "x86_64": (202, 324),
    "aarch64": (98, 283),
    "riscv64": (98, 283),
    "loongarch64": (98, 283),
    "ppc64le": (221, 365),
    "s390x": (238, 356),
}
_SYS_FUTEX, _SYS_MEMBARRIER = _SYSCALLS.get(_MACHINE, (-1, -1))
_SYS_FUTEX_WAITV = 449

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_FUTEX_32 = 2
_CLOCK_MONOTONIC = 1
FUTEX_WAITV_MAX = 128
"""Most words that one futex_waitv(2) takes (FUTEX_WAITV_MAX)."""

_MEMBARRIER_CMD_QUERY = 0
_MEMBARRIER_CMD_GLOBAL_EXPEDITED = 1 << 1

_POLL_S = 0.0005


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Waiter(ctypes.Structure):
    _fields_ = (
        ("val", ctypes.c_uint64),
        ("uaddr", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


FUTEX_AVAILABLE = _LINUX_64 and _SYS_FUTEX > 0

if _LINUX_64:
    _libc = ctypes.CDLL(None, use_errno=True)
    _sys_futex = _libc["syscall"]
    _sys_futex.restype = ctypes.c_long
    _sys_futex.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Timespec),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    _sys_waitv = _libc["syscall"]
    _sys_waitv.restype = ctypes.c_long
    _sys_waitv.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.POINTER(_Timespec),
        ctypes.c_int,
    )
    _sys_membarrier = _libc["syscall"]
    _sys_membarrier.restype = ctypes.c_long
    _sys_membarrier.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int)


def _timespec(seconds: float) -> _Timespec:
    nanoseconds = max(0, int(seconds * 1e9))
    return _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)


def _woken(result: int, what: str) -> bool:
    """True for woken, changed beforehand or interrupted by a signal; False for a timeout; otherwise OSError."""
    if result >= 0:
        return True
    number = ctypes.get_errno()
    if number == errno.ETIMEDOUT:
        return False
    if number in (errno.EAGAIN, errno.EINTR):
        return True
    raise OSError(number, f"{what}: {errno.errorcode.get(number, number)}")


def futex_wait(address: int, expected: int, timeout_s: float) -> bool:
    """Sleep while the 32-bit word at ``address`` equals ``expected``, at most ``timeout_s`` seconds.

    Returns False after the timeout, True otherwise; True says nothing about the word, the caller looks again (futex(2):
    spurious wake-ups and signals).  The word must be 4-byte aligned and stay mapped.
    """
    if timeout_s <= 0:
        return False
    if not FUTEX_AVAILABLE:
        return _poll((address,), (expected,), timeout_s)
    spec = _timespec(timeout_s)
    return _woken(_sys_futex(_SYS_FUTEX, address, _FUTEX_WAIT, expected & 0xFFFFFFFF, spec, None, 0), "futex_wait")


def futex_wake(address: int, num_waiters: int = 1) -> int:
    """Wake at most ``num_waiters`` sleepers on the word at ``address``; returns how many were woken."""
    if not FUTEX_AVAILABLE:
        return 0
    woken = _sys_futex(_SYS_FUTEX, address, _FUTEX_WAKE, num_waiters, None, None, 0)
    if woken < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"futex_wake: {errno.errorcode.get(number, number)}")
    return int(woken)


def futex_waitv(addresses: Sequence[int], expected: Sequence[int], timeout_s: float) -> bool:
    """Sleep while every word equals its expected value (Linux 5.16 and later), at most :data:`FUTEX_WAITV_MAX` words.

    Returns as :func:`futex_wait`.  Raises OSError where the kernel has no such call: ask :func:`futex_waitv_available`.
    """
    if timeout_s <= 0:
        return False
    if not FUTEX_AVAILABLE:
        return _poll(addresses, expected, timeout_s)
    waiters = (_Waiter * len(addresses))(
        *[
            _Waiter(value & 0xFFFFFFFF, address, _FUTEX_32, 0)
            for address, value in zip(addresses, expected, strict=True)
        ]
    )
    until = _timespec(time.clock_gettime(_CLOCK_MONOTONIC) + timeout_s)
    result = _sys_waitv(_SYS_FUTEX_WAITV, ctypes.addressof(waiters), len(waiters), 0, until, _CLOCK_MONOTONIC)
    return _woken(result, "futex_waitv")


_waitv_known: list[bool] = []


def futex_waitv_available() -> bool:
    """Whether the kernel has futex_waitv(2); asked once, with a word that does not hold the expected value."""
    if not _waitv_known:
        _waitv_known.append(FUTEX_AVAILABLE and _probe_waitv())
    return _waitv_known[0]


def _probe_waitv() -> bool:
    word = ctypes.c_uint32(1)
    try:
        return futex_waitv((ctypes.addressof(word),), (0,), 0.001)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return False
        raise


def _poll(addresses: Sequence[int], expected: Sequence[int], timeout_s: float) -> bool:
    words = [ctypes.c_uint32.from_address(address) for address in addresses]
    deadline = time.monotonic() + timeout_s
    while all(word.value == value & 0xFFFFFFFF for word, value in zip(words, expected, strict=True)):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        time.sleep(min(_POLL_S, remaining_s))
    return True


def _membarrier() -> None:
    if _sys_membarrier(_SYS_MEMBARRIER, _MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"membarrier: {errno.errorcode.get(number, number)}")


def _nothing() -> None:
    return None


def _membarrier_available() -> bool:
    if not _LINUX_64 or _SYS_MEMBARRIER < 0:
        return False
    commands = int(_sys_membarrier(_SYS_MEMBARRIER, _MEMBARRIER_CMD_QUERY, 0, 0))
    return commands > 0 and bool(commands & _MEMBARRIER_CMD_GLOBAL_EXPEDITED)


FENCE_AVAILABLE = STORE_ORDER_STRONG or _membarrier_available()
"""Whether a full fence can be had on this machine."""


def require_fence(what: str) -> None:
    """Raise NotImplementedError where no fence can be had, so that ``what`` is refused at construction."""
    if not FENCE_AVAILABLE:
        raise NotImplementedError(
            f"{what} needs full memory fences between processes; on {sys.platform}/{_MACHINE} the library has none: "
            "it knows x86-64, and Linux kernels with membarrier(2) GLOBAL_EXPEDITED (4.16 and later, CONFIG_MEMBARRIER)"
        )


def make_fence() -> tuple[Callable[[], object], Callable[[], object]]:
    """A fresh fence as two calls: the first and then the second are a full memory fence of the calling thread.

    Two, because calling a lock's own methods costs a third of a ``with`` statement.  One pair per endpoint and used
    by one thread at a time, so that the lock behind it is never contended: an acquisition that fails need not execute
    the atomic instruction.  It never waits: an exception between the two, as of Ctrl-C, leaves the lock taken, and the next
    acquisition must not wait for itself; the release behind it executes the instruction in any case.
    """
    require_fence("a fence")
    if STORE_ORDER_STRONG:
        lock = threading.Lock()
        return partial(lock.acquire, False), lock.release
    return _membarrier, _nothing


def full_fence() -> None:
    """A full memory fence of the calling thread, where its cost does not matter."""
    begin, end = make_fence()
    begin()
    end()
