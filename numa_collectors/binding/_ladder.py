"""Which rung of the ladder this process can stand on, tried out once, and the one warning about a lower one."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
import threading
from dataclasses import dataclass

from numa_collectors import _mempolicy, _nodes
from numa_collectors.binding._request import Rung

__all__ = ["Probe", "probe", "probe_ladder", "remedy", "warn_once"]

_LOG = logging.getLogger("numa_collectors.binding")

# Children inherit the environment, so that a whole tree of processes warns once.
_WARNED = "NUMA_COLLECTORS_BINDING_WARNED"

_REMEDIES = {
    "mempolicy-refused": "allow the memory-policy calls: docker run --cap-add SYS_NICE, or in Kubernetes "
    "securityContext.capabilities.add: [SYS_NICE]",
    "mempolicy-missing": "use a kernel with CONFIG_NUMA and a container runtime that passes its memory-policy calls on",
    "affinity-refused": "allow sched_setaffinity in the container's seccomp profile",
    "affinity-trimmed": "widen the process's mask (taskset, cpuset.cpus, docker --cpuset-cpus), or plan within it",
    "cpus-not-allowed": "widen the process's mask (taskset, cpuset.cpus, docker --cpuset-cpus), or plan within it",
    "node-not-allowed": "widen cpuset.mems of its cgroup (docker --cpuset-mems), or plan within it",
    "policy-trimmed": "widen cpuset.mems of its cgroup (docker --cpuset-mems), or plan within it",
}


@dataclass(frozen=True)
class Probe:
    """The best rung and, below the first one, why: words, the kernel's errno, a stable code."""

    rung: Rung
    reason: str | None = None
    errno: int | None = None
    code: str | None = None


def refusal_code(number: int | None) -> str:
    """Return the code for a policy call that failed with ``number``."""
    return "mempolicy-missing" if number == errno.ENOSYS else "mempolicy-refused"


def remedy(code: str | None) -> str | None:
    """Return what a user can do about ``code``."""
    return _REMEDIES.get(code or "")


def _try_affinity() -> Probe | None:
    try:
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, mask)
    except OSError as error:
        return Probe("none", f"sched_setaffinity refused ({error.strerror})", error.errno, "affinity-refused")
    return None


def _try_policy() -> Probe:
    lower: Rung = "cpu+first-touch" if _nodes.described() else "cpu"
    try:
        nodes = (_nodes.allowed_nodes() or _nodes.memory_nodes())[:1]
        _mempolicy.set_mempolicy(_mempolicy.MPOL_PREFERRED, nodes)
        seen = _mempolicy.get_mempolicy()
    except OSError as error:
        reason = f"memory policy refused ({error.strerror})"
        return Probe(lower, reason, error.errno, refusal_code(error.errno))
    if seen != (_mempolicy.MPOL_PREFERRED, nodes):
        return Probe(lower, f"set_mempolicy reported success, but {seen} holds", None, "mempolicy-refused")
    return Probe("policy+cpu")


@functools.cache
def probe() -> Probe:
    """Return what this process can do, by doing it once in a thread of its own, whose mask and policy die with it."""
    if not sys.platform.startswith("linux"):
        return Probe(
            "none", f"{sys.platform} has no CPU masks and memory policies to set", None, "platform-unsupported"
        )
    found: list[Probe] = []

    def body() -> None:
        found.append(_try_affinity() or _try_policy())

    thread = threading.Thread(target=body, name="numa-collectors-probe", daemon=True)
    thread.start()
    thread.join()
    return found[0] if found else Probe("none", "the probe failed", None, "probe-failed")


def probe_ladder() -> Rung:
    """Return the best rung that this process can stand on (see :func:`probe` for the reason)."""
    return probe().rung


def warn_once(code: str, reason: str, rung: Rung) -> None:
    """Log the step down to ``rung`` with its remedy, once in a tree of processes; later ones go to the debug level."""
    if code == "platform-unsupported":
        _LOG.info("no binding: %s", reason)
        return
    level = logging.DEBUG if os.environ.get(_WARNED) else logging.WARNING
    os.environ[_WARNED] = code
    _LOG.log(level, "binding steps down to %r: %s; remedy: %s", rung, reason, remedy(code) or "see the reason")
