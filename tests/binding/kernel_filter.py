"""A seccomp filter for the calling process and its children: chosen system calls fail with a chosen errno."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

# arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h
_NUMBERS = {
    "x86_64": {
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "migrate_pages": 256,
        "move_pages": 279,
        "sched_setaffinity": 203,
        "madvise": 28,
        "openat": 257,
    },
    "aarch64": {
        "mbind": 235,
        "get_mempolicy": 236,
        "set_mempolicy": 237,
        "migrate_pages": 238,
        "move_pages": 239,
        "sched_setaffinity": 122,
        "madvise": 233,
        "openat": 56,
    },
}
# linux/audit.h
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# What moby's default profile withholds.
POLICY_CALLS = ("mbind", "set_mempolicy", "get_mempolicy", "migrate_pages", "move_pages")


def refuse(error: int, *calls: str) -> None:
    """Make ``calls`` fail with ``error`` from now on, for good."""
    machine = platform.machine()
    numbers = [_NUMBERS[machine][call] for call in calls]
    load, equal, ret = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
    allow, refused = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO
    program = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[machine]), (ret, 0, 0, allow), (load, 0, 0, 0)]
    program += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    program += [(ret, 0, 0, allow), (ret, 0, 0, refused | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
    for option, value, pointer in ((no_new_privileges, 1, 0), (set_seccomp, filter_mode, ctypes.addressof(header))):
        if prctl(option, value, pointer, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
