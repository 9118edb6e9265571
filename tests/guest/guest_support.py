"""What guest tests share: raw system calls and kernel files, an oracle that owes nothing to the library under test."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import signal
import struct
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# linux/mempolicy.h
MPOL_DEFAULT, MPOL_PREFERRED, MPOL_BIND, MPOL_INTERLEAVE, MPOL_LOCAL = 0, 1, 2, 3, 4
MPOL_MF_STRICT, MPOL_MF_MOVE, MPOL_F_MEMS_ALLOWED = 1, 2, 4
PAGE_BYTES = mmap.PAGESIZE
ROOT = Path(__file__).resolve().parents[2]
NODES = Path("/sys/devices/system/node")
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineFacts:
    """What a guest's kernel shows: sets of nodes, then CPUs and distances of each online node, as sysfs writes them."""

    online: str
    has_cpu: str
    has_memory: str
    cpulists: tuple[str, ...]
    distances: tuple[str, ...]


_NEAR_FAR = ("10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10")
_LINE = tuple(" ".join(str(10 + 2 * abs(a - b)) for b in range(8)) for a in range(8))
_TWO = ("10 21", "21 10")

MACHINES = {
    "2n": MachineFacts("0-1", "0-1", "0-1", ("0-1", "2-3"), _TWO),
    "2n-arm": MachineFacts("0-1", "0-1", "0-1", ("0-1", "2-3"), _TWO),
    "smt": MachineFacts("0-1", "0-1", "0-1", ("0-3", "4-7"), _TWO),
    "small": MachineFacts("0-1", "0-1", "0-1", ("0-1", "2-3"), _TWO),
    "pci": MachineFacts("0-1", "0-1", "0-1", ("0,2", "1,3"), _TWO),
    "4n": MachineFacts("0-3", "0-3", "0-3", ("0", "1", "2", "3"), _NEAR_FAR),
    "8n": MachineFacts("0-7", "0-7", "0-7", tuple("01234567"), _LINE),
    "memonly": MachineFacts("0-2", "0-1", "0-2", ("0-1", "2-3", ""), ("10 21 17", "21 10 28", "17 28 10")),
    "memless": MachineFacts("0-1", "0-1", "0", ("0-1", "2-3"), _TWO),
    # Columns of a distance row are the online nodes only: column 1 is node 2.
    "sparse": MachineFacts("0,2", "0,2", "0,2", ("0-1", "2-3"), ("10 31", "31 10")),
}


@dataclass(frozen=True)
class Syscalls:
    """System call numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""

    mbind: int
    get_mempolicy: int
    set_mempolicy: int
    migrate_pages: int
    move_pages: int
    audit_arch: int  # linux/audit.h


SYSCALLS = {
    "x86_64": Syscalls(237, 239, 238, 256, 279, 0xC000003E),
    "aarch64": Syscalls(235, 236, 237, 238, 239, 0xC00000B7),
}[os.uname().machine]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_MASK_WORDS = 16  # 1,024 nodes


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    words = (ctypes.c_ulong * _MASK_WORDS)()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    return words


def set_mempolicy(mode: int, nodes: Sequence[int] = (), maxnode: int = 1024) -> None:
    """Set the calling thread's policy; ``maxnode`` as the kernel takes it (it uses one bit less)."""
    mask = _mask(nodes) if nodes else None
    _call(SYSCALLS.set_mempolicy, ctypes.c_long(mode), mask, ctypes.c_ulong(maxnode if nodes else 0))


def get_mempolicy(flags: int = 0) -> tuple[int, list[int]]:
    """Return (mode, nodes) of the calling thread; with ``MPOL_F_MEMS_ALLOWED`` the nodes it may use."""
    mode, mask = ctypes.c_int(0), _mask(())
    _call(SYSCALLS.get_mempolicy, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(flags))
    return mode.value, [bit for bit in range(1024) if mask[bit // 64] >> bit % 64 & 1]


def mbind(address: int, length: int, mode: int, nodes: Sequence[int], flags: int = 0) -> None:
    mask = _mask(nodes)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(length), ctypes.c_long(mode), mask)
    _call(SYSCALLS.mbind, *arguments, ctypes.c_ulong(1024), ctypes.c_ulong(flags))


def page_nodes(address: int, num_pages: int, pid: int = 0, step: int = 1) -> list[int]:
    """The node of every ``step``-th page, or a negative errno for one that has no page."""
    places = range(address, address + num_pages * PAGE_BYTES, step * PAGE_BYTES)
    pages = (ctypes.c_void_p * len(places))(*places)
    status = (ctypes.c_int * len(places))(*([-9999] * len(places)))
    _call(SYSCALLS.move_pages, ctypes.c_int(pid), ctypes.c_ulong(len(places)), pages, None, status, ctypes.c_int(0))
    return list(status)


@contextlib.contextmanager
def mapping(num_pages: int, fd: int = -1) -> Iterator[tuple[mmap.mmap, int]]:
    """A mapping and its address: anonymous and private, or shared with a descriptor."""
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(fd, num_pages * PAGE_BYTES, flags=flags)
    holder = ctypes.c_char.from_buffer(memory)
    try:
        yield memory, ctypes.addressof(holder)
    finally:
        del holder
        memory.close()


def touch(memory: mmap.mmap) -> None:
    """Write-fault each page in, in one call (MADV_POPULATE_WRITE, Linux 5.14)."""
    memory.madvise(23)


def _anonymous_addresses(pid: int | str) -> list[int]:
    """Addresses of all resident anonymous pages (Documentation/admin-guide/mm/pagemap.rst)."""
    present, file_or_shared = 1 << 63, 1 << 61
    found: list[int] = []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            start, end = (int(text, 16) for text in line.split(" ", 1)[0].split("-"))
            if line.endswith("[vsyscall]"):
                continue
            pagemap.seek(start // PAGE_BYTES * 8)
            entries = memoryview(pagemap.read((end - start) // PAGE_BYTES * 8)).cast("Q")
            for index, entry in enumerate(entries):
                if entry & present and not entry & file_or_shared:
                    found.append(start + index * PAGE_BYTES)
    return found


def private_pages(pid: int = 0) -> dict[int, int]:
    """Anonymous pages of a process (0: the caller) by node: heap, stacks, copied file pages; page cache left out.

    numa_maps cannot tell this: its per-node counts mix a mapping's copied pages with its clean ones.
    """
    addresses = _anonymous_addresses(pid or "self")
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    status = (ctypes.c_int * len(addresses))()
    count = ctypes.c_ulong(len(addresses))
    _call(SYSCALLS.move_pages, ctypes.c_int(pid), count, pages, None, status, ctypes.c_int(0))
    # A page may go between the two readings; it then has a negative status.
    return dict(sorted(Counter(node for node in status if node >= 0).items()))


def anonymous_mappings(pid: int | str = "self") -> dict[int, int]:
    """Pages by node of those mappings that no file backs, out of numa_maps: a container's filter leaves it readable."""
    pages: Counter[int] = Counter()
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if " anon=" in line and " file=" not in line:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                pages[int(node)] += int(count)
    return dict(sorted(pages.items()))


def send_own_state(pipe: Connection) -> None:
    """Send policy, private pages by node and affinity of the calling process.

    It is here and not in a test module, since a spawned child imports the module of what it runs, and pytest with it.
    """
    pipe.send((get_mempolicy(), private_pages(), sorted(os.sched_getaffinity(0))))
    pipe.close()


def node_file(node: int, name: str) -> str:
    return (NODES / f"node{node}" / name).read_text().strip()


def node_memory_kib(node: int, field: str = "MemTotal") -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", node_file(node, "meminfo"))
    assert match, f"no {field} in node {node}'s meminfo"
    return int(match.group(1))


def run_python(code: str, *arguments: str, before: Callable[[], None] | None = None, timeout_s: float = 90.0) -> Any:
    """Run ``code`` in a fresh interpreter and return what it prints last, as JSON.

    ``before`` runs in the child between fork and exec.  The child sees the library and these helpers.
    """
    import subprocess  # children import this module too, and need it only to start others

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        preexec_fn=before,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, f"the child exited with {result.returncode}:\n{result.stdout}\n{result.stderr}"
    return json.loads(result.stdout.strip().splitlines()[-1])


def in_child(function: Callable[..., object], *arguments: object, timeout_s: float = 90.0) -> Any:
    """Call ``function`` in a forked child and return its result, which must be JSON; a fork is 50 times cheaper here
    than a fresh interpreter.  The child may change its own policy, affinity, cgroup and filters."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        # The only other thread is the timeout's timer, and the child does not touch it.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(there, json.dumps(function(*arguments)).encode())
            code = 0
        except BaseException:  # noqa: BLE001 - shown in the parent
            os.write(there, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(there)
    with open(here, encoding="utf-8") as pipe:
        watchdog = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
        watchdog.start()
        text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        watchdog.cancel()
        watchdog.join()
    assert status == 0, f"the child exited with {status}:\n{text}"
    return json.loads(text)


def refused(call: Callable[..., object], *arguments: object) -> int:
    """The errno that ``call`` fails with, 0 where it does not."""
    try:
        call(*arguments)
    except OSError as error:
        return error.errno or -1
    return 0


def write_kernel_file(path: Path, text: str) -> None:
    """Write in one system call: a buffered write would show the kernel's refusal at an implicit close, or never."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def cpuset(*, cpus: str = "", mems: str = "", name: str = "test") -> Iterator[Path]:
    """A cgroup with a cpuset; processes join by ``cgroup.procs`` and are moved out again at the end."""
    write_kernel_file(CGROUPS / "cgroup.subtree_control", "+cpuset")
    group = CGROUPS / name
    group.mkdir()
    try:
        if cpus:
            write_kernel_file(group / "cpuset.cpus", cpus)
        if mems:
            write_kernel_file(group / "cpuset.mems", mems)
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                write_kernel_file(CGROUPS / "cgroup.procs", pid)
        group.rmdir()


def join(group: Path) -> None:
    """Move the calling process into a cgroup."""
    write_kernel_file(group / "cgroup.procs", str(os.getpid()))


def refuse_policy_calls(error: int) -> None:
    """Make every policy call of this process and its children fail with ``error``, as container runtimes do.

    The calls are those that moby's default seccomp profile withholds: mbind, get_mempolicy, set_mempolicy,
    migrate_pages and move_pages.
    """
    numbers = (
        SYSCALLS.mbind,
        SYSCALLS.get_mempolicy,
        SYSCALLS.set_mempolicy,
        SYSCALLS.migrate_pages,
        SYSCALLS.move_pages,
    )
    load, equal, ret = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    allow, refuse = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    program = [(load, 0, 0, 4), (equal, 1, 0, SYSCALLS.audit_arch), (ret, 0, 0, allow), (load, 0, 0, 0)]
    for index, number in enumerate(numbers):
        program.append((equal, len(numbers) - index, 0, number))
    program += [(ret, 0, 0, allow), (ret, 0, 0, refuse | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
    for arguments in ((no_new_privileges, 1, None), (set_seccomp, filter_mode, ctypes.byref(header))):
        option, value, pointer = arguments
        result = _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
        if result != 0:
            code_number = ctypes.get_errno()
            raise OSError(code_number, os.strerror(code_number))
