"""What is asked of a binding, and what is said back about it: plain values, no system call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from numa_collectors import _mempolicy
from numa_collectors._cpulist import format_cpulist
from numa_collectors.errors import BindingError

__all__ = ["RUNGS", "BindMode", "BindPolicy", "BindReport", "BindRequest", "Drift", "Rung", "Stray"]

BindPolicy = Literal["preferred", "bind", "interleave", "local", "none"]
BindMode = Literal["auto", "require", "off"]
Rung = Literal["policy+cpu", "cpu+first-touch", "cpu", "none"]

RUNGS: tuple[Rung, ...] = ("policy+cpu", "cpu+first-touch", "cpu", "none")
_POLICIES = ("preferred", "bind", "interleave", "local", "none")
_MODES = ("auto", "require", "off")

# Under a container's filter, pinned before birth, 99 % of a worker's private pages were measured local; what lies
# elsewhere was copied from the page cache.
LOCAL_ENOUGH = 0.98


def _ids(name: str, values: Iterable[object] | None) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = () if isinstance(values, str) else tuple(value for value in values if type(value) is int)
    if isinstance(values, str) or len(ids) != len(tuple(values)):
        raise BindingError(
            f"expected {name} as whole numbers such as (0, 1), got {values!r}; parse a cpulist first",
            code="bad-request",
        )
    if not ids or min(ids) < 0:
        raise BindingError(
            f"expected {name} as one or more ids from 0 on, or None for no binding, got {values!r}", code="bad-request"
        )
    return tuple(sorted(set(ids)))


def policy_words(policy: tuple[int, tuple[int, ...]]) -> str:
    """Return mode and nodes as people read them: ``preferred:1``, ``local``."""
    nodes = format_cpulist(policy[1])
    return _mempolicy.policy_name(policy[0]) + (f":{nodes}" if nodes else "")


@dataclass(frozen=True)
class BindRequest:
    """What one worker is to be bound to; ``None`` leaves that side as the caller has it.

    ``cpus``: OS indices.  ``memory_nodes`` with ``policy``: ``"preferred"`` spills when the nodes are full, ``"bind"``
    never does, ``"interleave"`` goes round them, ``"local"`` follows the CPU (no nodes), ``"none"`` sets no policy.
    ``mode``: ``"auto"`` steps down where the kernel refuses, ``"require"`` raises, ``"off"`` does nothing.
    ``num_threads`` caps the thread pools of numerical libraries (see :func:`thread_caps`).  Raises ``BindingError``
    (code ``bad-request``).
    """

    cpus: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None
    policy: BindPolicy = "preferred"
    mode: BindMode = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "cpus", _ids("cpus", self.cpus))
        object.__setattr__(self, "memory_nodes", _ids("memory_nodes", self.memory_nodes))
        for name, value, known in (("policy", self.policy, _POLICIES), ("mode", self.mode, _MODES)):
            if value not in known:
                raise BindingError(f"expected {name} as one of {', '.join(known)}, got {value!r}", code="bad-request")
        if self.num_threads is not None and self.num_threads < 1:
            raise BindingError(f"expected num_threads of at least 1, got {self.num_threads}", code="bad-request")

    @property
    def wants_cpus(self) -> bool:
        return self.mode != "off" and self.cpus is not None

    @property
    def wants_policy(self) -> bool:
        if self.mode == "off" or self.policy == "none":
            return False
        return self.policy == "local" or self.memory_nodes is not None

    @property
    def target(self) -> Rung:
        """The highest rung of the ladder that this request has a use for."""
        if self.wants_policy:
            return "policy+cpu"
        return "cpu" if self.wants_cpus else "none"

    def kernel_policy(self) -> tuple[int, tuple[int, ...]]:
        """Return mode and nodes as the kernel should show them; only where :attr:`wants_policy`."""
        nodes = self.memory_nodes or ()
        if self.policy == "local":
            return _mempolicy.MPOL_LOCAL, ()
        if self.policy == "preferred":
            return (_mempolicy.MPOL_PREFERRED if len(nodes) == 1 else _mempolicy.MPOL_PREFERRED_MANY), nodes
        return (_mempolicy.MPOL_BIND if self.policy == "bind" else _mempolicy.MPOL_INTERLEAVE), nodes


@dataclass(frozen=True)
class Stray:
    """A thread that may run on CPUs that were not asked for."""

    tid: int
    name: str
    cpus: tuple[int, ...]

    def __str__(self) -> str:
        return f"thread {self.tid} ({self.name}) may run on CPUs {format_cpulist(self.cpus)}"


@dataclass(frozen=True)
class BindReport:
    """What took effect, read back from the kernel.

    ``applied`` is the rung that holds (``RUNGS``, best first).  ``verified`` is True only if it was seen: every
    thread's mask inside the CPUs asked for, the policy as asked (on the first rung), and at least 98 % of the sampled
    private pages on the expected nodes, with at least one page seen.  ``cpus`` is the mask of the main thread,
    ``policy`` and ``policy_nodes`` the calling thread's (None where unreadable).  ``pages_total`` counts the sampled
    pages with a known place, ``pages_on_node`` those of them on the expected nodes; ``pages_unknown`` had no answer and
    count as neither.  ``evidence`` is where the pages were looked up (``"move_pages"``, ``"numa_maps"``, ``"none"``).
    ``code`` and ``errno`` name the cause of a step down.
    """

    requested: BindRequest
    applied: Rung = "none"
    verified: bool = False
    reason: str | None = None
    errno: int | None = None
    code: str | None = None
    cpus: tuple[int, ...] | None = None
    policy: str | None = None
    policy_nodes: tuple[int, ...] = ()
    num_threads_checked: int = 0
    pages_on_node: int = 0
    pages_total: int = 0
    pages_unknown: int = 0
    pages_per_node: Mapping[int, int] = field(default_factory=dict)
    evidence: str = "none"
    nodes_allowed: tuple[int, ...] | None = None
    strays: tuple[Stray, ...] = ()

    @property
    def stepped_down(self) -> bool:
        """Whether less holds than the request had a use for."""
        return RUNGS.index(self.applied) > RUNGS.index(self.requested.target)

    @property
    def local_fraction(self) -> float | None:
        """Share of the known pages on the expected nodes; None where no page is known."""
        return self.pages_on_node / self.pages_total if self.pages_total else None

    def check(self) -> None:
        """Raise ``BindingError`` if the request's mode is ``"require"`` and it does not verifiably hold."""
        if self.requested.mode != "require" or self.requested.target == "none":
            return
        if self.stepped_down or not self.verified:
            raise BindingError(
                f"the binding was required, but does not hold: {self}", code=self.code or "unverified", errno=self.errno
            )

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values, for logs and JSON."""
        return asdict(self)

    def __str__(self) -> str:
        parts: list[str] = [self.applied]
        if self.cpus is not None:
            parts.append(f"CPUs {format_cpulist(self.cpus)}")
        if self.policy is not None:
            nodes = format_cpulist(self.policy_nodes)
            parts.append(f"memory {self.policy}:{nodes}" if nodes else f"memory {self.policy}")
        share = self.local_fraction
        if share is not None:
            parts.append(f"{self.pages_on_node} of {self.pages_total} pages ({100 * share:.1f} %) on their nodes")
        parts.append("verified" if self.verified else "unverified")
        return ", ".join(parts) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Drift:
    """One thing that no longer is as it was: ``kind`` is ``affinity``, ``policy``, ``nodes`` or ``pages``."""

    kind: Literal["affinity", "policy", "nodes", "pages"]
    what: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} before, {self.now} now"
