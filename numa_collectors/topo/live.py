"""Advice that only the running machine can give: shared memory, libnuma, and whether memory policies work."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from numa_collectors.topo.advice import Advice
from numa_collectors.topo.model import Topology

__all__ = ["live_advice"]

_SHM = "/dev/shm"
# Docker's default is 64 MiB.
_SMALL_SHM_BYTES = 256 << 20


def live_advice(topology: Topology, rung: str, remedy: str | None) -> tuple[Advice, ...]:
    """Return advice about this machine; ``rung`` is what the write probe of the binding ladder found possible."""
    return (*_policy(topology, rung, remedy), *_shm(), *_libnuma(topology))


def _policy(topology: Topology, rung: str, remedy: str | None) -> Iterator[Advice]:
    if sys.platform != "linux":
        yield Advice(
            "no-binding", f"{sys.platform} lets no process be bound to CPUs or nodes: placement is not applied here"
        )
    elif rung != "policy+cpu" and topology.is_numa:
        yield Advice(
            "mempolicy-refused",
            f"memory policies are refused here: the best that works is {rung}",
            remedy or "docker: --cap-add SYS_NICE, or a seccomp profile that allows set_mempolicy and mbind",
        )


def _shm() -> Iterator[Advice]:
    if not os.path.isdir(_SHM):
        return
    status = os.statvfs(_SHM)
    size = status.f_blocks * status.f_frsize
    if size < _SMALL_SHM_BYTES:
        yield Advice(
            "small-shm",
            f"{_SHM} holds {size >> 20} MiB: rings and snapshots do not use it, but PyTorch's data loaders do",
            "docker: --shm-size=8g or --ipc=host",
        )


def _libnuma(topology: Topology) -> Iterator[Advice]:
    if not (topology.is_numa and sys.platform == "linux"):
        return
    import ctypes

    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        yield Advice("libnuma-absent", f"libnuma does not load ({error}): the same system calls are made without it")
