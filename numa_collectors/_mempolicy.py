"""The kernel's memory-policy calls, without trust in anybody's return value.

Guarantees: every refusal is an ``OSError`` with the kernel's errno; reads never go through the library that wrote.
Assumes: Linux with ``CONFIG_NUMA``; elsewhere :func:`supported` is False and every call raises ``OSError(ENOSYS)``.
Not covered: weighted interleave (Linux 6.9+), which no policy of this library needs.

Writes go through the ``libnuma`` that py-libnuma found, if that library passes :func:`_disagreement`; else straight
through syscall(2).  Reads (``get_mempolicy``, ``move_pages`` as a query) always use syscall(2), so that a worker that
only reads back never loads a library for it, and so that a library that reports a refusal as success is found out.

Numbers: ``include/uapi/linux/mempolicy.h``, ``arch/x86/entry/syscalls/syscall_64.tbl``,
``include/uapi/asm-generic/unistd.h``, ``arch/{powerpc,s390}/kernel/syscalls/syscall.tbl``.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "MPOL_BIND",
    "MPOL_DEFAULT",
    "MPOL_F_ADDR",
    "MPOL_F_MEMS_ALLOWED",
    "MPOL_INTERLEAVE",
    "MPOL_LOCAL",
    "MPOL_MF_MOVE",
    "MPOL_MF_STRICT",
    "MPOL_PREFERRED",
    "MPOL_PREFERRED_MANY",
    "backend",
    "backend_reason",
    "get_mempolicy",
    "mbind",
    "mems_allowed",
    "move_pages_status",
    "policy_name",
    "set_mempolicy",
    "supported",
]

MPOL_DEFAULT = 0
MPOL_PREFERRED = 1
MPOL_BIND = 2
MPOL_INTERLEAVE = 3
MPOL_LOCAL = 4
MPOL_PREFERRED_MANY = 5

MPOL_MF_STRICT = 1
MPOL_MF_MOVE = 2

MPOL_F_ADDR = 2
MPOL_F_MEMS_ALLOWED = 4

# A mode that is read back may carry MPOL_F_STATIC_NODES, _RELATIVE_NODES and _NUMA_BALANCING in bits 13 to 15.
_MODE_BITS = (1 << 13) - 1
_NAMES = {
    MPOL_DEFAULT: "default",
    MPOL_PREFERRED: "preferred",
    MPOL_BIND: "bind",
    MPOL_INTERLEAVE: "interleave",
    MPOL_LOCAL: "local",
    MPOL_PREFERRED_MANY: "preferred-many",
}

# The kernel uses maxnode - 1 bits, wants the mask of a query to cover nr_node_ids, and accepts wider masks whose upper
# bits are zero, up to a page (mm/mempolicy.c: get_nodes, copy_nodes_to_user).  4,096 nodes are four times the largest
# configuration.
_NUM_MASK_BITS = 4096
_MAX_NODE = _NUM_MASK_BITS + 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_Mask = ctypes.c_ulong * (_NUM_MASK_BITS // _WORD_BITS)

# move_pages takes any count; a bounded one keeps the address and status arrays within 1 MiB.
_PAGES_PER_QUERY = 1 << 16


@dataclass(frozen=True)
class _Numbers:
    mbind: int
    get_mempolicy: int
    set_mempolicy: int
    move_pages: int


_GENERIC = _Numbers(mbind=235, get_mempolicy=236, set_mempolicy=237, move_pages=239)
_SYSCALLS = {
    "x86_64": _Numbers(mbind=237, get_mempolicy=239, set_mempolicy=238, move_pages=279),
    "aarch64": _GENERIC,
    "riscv64": _GENERIC,
    "loongarch64": _GENERIC,
    "ppc64le": _Numbers(mbind=259, get_mempolicy=260, set_mempolicy=261, move_pages=301),
    "s390x": _Numbers(mbind=268, get_mempolicy=269, set_mempolicy=270, move_pages=310),
}


@functools.cache
def _numbers() -> _Numbers | None:
    # A 32-bit interpreter on a 64-bit kernel has another syscall table.
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        return None
    return _SYSCALLS.get(platform.machine())


@functools.cache
def _libc_syscall() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    return function


def _fail(call: str, number: int) -> OSError:
    return OSError(number, f"{call}: {os.strerror(number)}")


def _checked(call: str, result: int) -> None:
    if result != 0:
        raise _fail(call, ctypes.get_errno() or errno.EIO)


def _require(call: str) -> _Numbers:
    numbers = _numbers()
    if numbers is None:
        raise _fail(call, errno.ENOSYS)
    return numbers


def _mask(call: str, nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = _Mask()
    for node in nodes:
        if not 0 <= node < _NUM_MASK_BITS:
            raise _fail(call, errno.EINVAL)
        mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return mask


def _nodes(mask: ctypes.Array[ctypes.c_ulong]) -> tuple[int, ...]:
    bits = sum(word << index * _WORD_BITS for index, word in enumerate(mask))
    return tuple(node for node in range(bits.bit_length()) if bits >> node & 1)


def supported() -> bool:
    """Return whether the kernel has the memory-policy calls at all (a seccomp filter may still refuse them)."""
    if _numbers() is None:
        return False
    try:
        get_mempolicy()
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


def policy_name(mode: int) -> str:
    """Return the mode in words: ``"default"``, ``"preferred"``, ``"bind"``, ``"interleave"``, ``"local"``, ...."""
    base = mode & _MODE_BITS
    return _NAMES.get(base, f"mode {base}")


def get_mempolicy(address: int | None = None) -> tuple[int, tuple[int, ...]]:
    """Return mode and nodes of the calling thread's policy, or of the mapping at ``address``.

    The mode comes without its flag bits.  Raises ``OSError`` where refused.
    """
    call = "get_mempolicy"
    numbers = _require(call)
    mode, mask = ctypes.c_int(), _Mask()
    flags = 0 if address is None else MPOL_F_ADDR
    result = _libc_syscall()(
        ctypes.c_long(numbers.get_mempolicy),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MAX_NODE),
        ctypes.c_void_p(address),
        ctypes.c_ulong(flags),
    )
    _checked(call, result)
    return mode.value & _MODE_BITS, _nodes(mask)


def mems_allowed() -> tuple[int, ...]:
    """Return the nodes that the calling thread's cpuset lets it allocate from; ``OSError`` where refused."""
    call = "get_mempolicy"
    numbers = _require(call)
    mask = _Mask()
    result = _libc_syscall()(
        ctypes.c_long(numbers.get_mempolicy),
        None,
        mask,
        ctypes.c_ulong(_MAX_NODE),
        None,
        ctypes.c_ulong(MPOL_F_MEMS_ALLOWED),
    )
    _checked(call, result)
    return _nodes(mask)


def move_pages_status(addresses: Sequence[int]) -> list[int]:
    """Return for each address of this process the node of its page, or a negative errno.

    Nothing is moved.  ``-ENOENT`` and ``-EFAULT`` mean "unknown", not "elsewhere": the page is not in this process's
    page tables, is the zero page, or is under a NUMA-balancing hint.  Raises ``OSError`` where the call is refused.
    """
    call = "move_pages"
    numbers = _require(call)
    statuses: list[int] = []
    for start in range(0, len(addresses), _PAGES_PER_QUERY):
        chunk = array("Q", addresses[start : start + _PAGES_PER_QUERY])
        # The kernel leaves a status untouched where it stops early; -EIO then reads as unknown, 0 would read as node 0.
        status = array("i", [-errno.EIO]) * len(chunk)
        result = _libc_syscall()(
            ctypes.c_long(numbers.move_pages),
            ctypes.c_int(0),
            ctypes.c_ulong(len(chunk)),
            ctypes.c_void_p(chunk.buffer_info()[0]),
            None,
            ctypes.c_void_p(status.buffer_info()[0]),
            ctypes.c_int(0),
        )
        if result < 0:
            raise _fail(call, ctypes.get_errno() or errno.EIO)
        statuses.extend(status)
    return statuses


@dataclass(frozen=True)
class _Writer:
    name: str
    set_mempolicy: Callable[..., int]
    mbind: Callable[..., int]


def _raw_set_mempolicy(mode: object, mask: object, max_node: object) -> int:
    return _libc_syscall()(ctypes.c_long(_require("set_mempolicy").set_mempolicy), mode, mask, max_node)


def _raw_mbind(*arguments: object) -> int:
    return _libc_syscall()(ctypes.c_long(_require("mbind").mbind), *arguments)


_RAW = _Writer("syscall", _raw_set_mempolicy, _raw_mbind)


def _outcome(function: Callable[..., int], *arguments: object) -> int:
    """Return 0, or the errno of the refusal."""
    ctypes.set_errno(0)
    return 0 if function(*arguments) == 0 else ctypes.get_errno() or errno.EIO


def _write_and_read_back(writer: _Writer) -> list[object]:
    """Return what the kernel shows after each of a series of calls by ``writer``, some of which must be refused."""
    no_node = _mask("probe", [])
    last_node = _mask("probe", [_NUM_MASK_BITS - 1])
    length, wide, no_flags = ctypes.c_ulong(mmap.PAGESIZE), ctypes.c_ulong(_MAX_NODE), ctypes.c_uint(0)
    seen: list[object] = []

    def read(address: int | None = None) -> object:
        try:
            return get_mempolicy(address)
        except OSError as error:
            return error.errno

    allowed = _mask("probe", _allowed_or_first())
    for mode, mask in ((MPOL_BIND, allowed), (MPOL_BIND, last_node), (MPOL_BIND, no_node), (MPOL_PREFERRED, allowed)):
        seen += [_outcome(writer.set_mempolicy, ctypes.c_int(mode), mask, wide), read()]
    _outcome(_RAW.set_mempolicy, ctypes.c_int(MPOL_DEFAULT), None, ctypes.c_ulong(0))
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        anchor = ctypes.c_char.from_buffer(page)
        address = ctypes.addressof(anchor)
        del anchor
        for start, mask in ((address, allowed), (address + 1, allowed), (address, last_node)):
            bind = ctypes.c_int(MPOL_BIND)
            seen += [_outcome(writer.mbind, ctypes.c_void_p(start), length, bind, mask, wide, no_flags), read(address)]
    return seen


def _allowed_or_first() -> tuple[int, ...]:
    try:
        return mems_allowed()[:1] or (0,)
    except OSError:
        return (0,)


def _disagreement(writer: _Writer) -> str | None:
    """Return how ``writer`` differs from the kernel's own calls, or None.

    Runs in a thread of its own, since a policy belongs to the thread that sets it and dies with it.
    """
    found: list[list[object]] = []

    def compare() -> None:
        found.extend(_write_and_read_back(candidate) for candidate in (writer, _RAW))

    thread = threading.Thread(target=compare, name="numa-collectors-libnuma-check", daemon=True)
    thread.start()
    thread.join()
    if len(found) != 2:
        return "its calls could not be compared with the kernel's"
    return None if found[0] == found[1] else f"its calls do not do what the kernel's do: {found[0]} against {found[1]}"


def _load_libnuma() -> tuple[_Writer | None, str]:
    try:
        import numa

        library = ctypes.CDLL(numa.LIBNUMA._name, use_errno=True)
        writer = _Writer("libnuma", library.set_mempolicy, library.mbind)
    except Exception as error:  # noqa: BLE001 - an optional dependency may fail in any way (AttributeError without libnuma.so)
        return None, f"py-libnuma is not usable ({type(error).__name__}: {error})"
    for function in (writer.set_mempolicy, writer.mbind):
        function.restype = ctypes.c_long  # type: ignore[attr-defined]
    difference = _disagreement(writer)
    if difference is not None:
        return None, f"py-libnuma's library is not usable: {difference}"
    return writer, f"py-libnuma's {numa.LIBNUMA._name}"


@functools.cache
def _writer() -> tuple[_Writer, str]:
    if not supported():
        return _Writer("none", _RAW.set_mempolicy, _RAW.mbind), "the kernel has no memory-policy calls"
    writer, reason = _load_libnuma()
    return (writer, reason) if writer is not None else (_RAW, reason)


def backend() -> str:
    """Return who carries out writes: ``"libnuma"``, ``"syscall"`` or ``"none"``."""
    return _writer()[0].name


def backend_reason() -> str:
    """Return in words why :func:`backend` is what it is."""
    return _writer()[1]


def set_mempolicy(mode: int, nodes: Iterable[int] = ()) -> None:
    """Set the memory policy of the calling thread, which its children and its exec inherit.

    Raises ``OSError``.  The kernel drops impossible nodes of a mask silently as long as one remains: read back.
    """
    call = "set_mempolicy"
    _require(call)
    mask = _mask(call, nodes)
    # MPOL_DEFAULT and MPOL_LOCAL want an empty mask; a null pointer is one.
    argument = None if mode in (MPOL_DEFAULT, MPOL_LOCAL) and not any(mask) else mask
    width = ctypes.c_ulong(0 if argument is None else _MAX_NODE)
    _checked(call, _writer()[0].set_mempolicy(ctypes.c_int(mode), argument, width))


def mbind(address: int, length: int, mode: int, nodes: Iterable[int] = (), flags: int = 0) -> None:
    """Set the policy of the pages of ``[address, address + length)`` that are not touched yet.

    ``address`` is page aligned.  Raises ``OSError``.  With ``MPOL_MF_MOVE`` the kernel returns success for shared pages
    that it did not move: read back.
    """
    call = "mbind"
    _require(call)
    mask = _mask(call, nodes)
    argument = None if mode in (MPOL_DEFAULT, MPOL_LOCAL) and not any(mask) else mask
    width = ctypes.c_ulong(0 if argument is None else _MAX_NODE)
    result = _writer()[0].mbind(
        ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_int(mode), argument, width, ctypes.c_uint(flags)
    )
    _checked(call, result)
