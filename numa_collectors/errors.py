"""Errors of the library, by who is to blame.

Every error is picklable, since most of them cross a process boundary, and each message says what was expected, what was
got, and what to do.  Catch :class:`NumaCollectorsError` to catch them all.
"""

from __future__ import annotations

__all__ = [
    "BindingError",
    "CheckpointError",
    "ConfigError",
    "NodeCapacityError",
    "NumaCollectorsError",
    "PeerLostError",
    "PlacementError",
    "RingClosedError",
    "SchemaMismatchError",
    "TopologyError",
    "WorkerFailedError",
    "WorkerStartTimeoutError",
]


class NumaCollectorsError(Exception):
    """Base class of every error that the library raises on purpose."""


class TopologyError(NumaCollectorsError):
    """The machine's description is missing, unreadable or not what its schema says."""


class PlacementError(NumaCollectorsError):
    """What was asked for does not fit on what the process was given."""


class BindingError(NumaCollectorsError):
    """The kernel refused or silently changed a binding that was required.

    ``code`` is a stable word for the cause (``"mempolicy-refused"``, ``"affinity-trimmed"``, ...), ``errno`` the
    kernel's number where there is one.
    """

    def __init__(self, message: str, *, code: str = "binding", errno: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.errno = errno

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_binding_error, (type(self), str(self), self.code, self.errno))


def _rebuild_binding_error(cls: type[BindingError], message: str, code: str, errno: int | None) -> BindingError:
    return cls(message, code=code, errno=errno)


class NodeCapacityError(NumaCollectorsError, MemoryError):
    """A NUMA node or a memory limit cannot hold what was asked for; nothing was allocated."""


class WorkerFailedError(NumaCollectorsError):
    """A worker died, hung or raised; ``failure`` is the record of the first one that did."""

    def __init__(self, message: str, failure: object = None) -> None:
        super().__init__(message)
        self.failure = failure

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.failure))


class WorkerStartTimeoutError(WorkerFailedError):
    """A worker did not become ready in time."""


class RingClosedError(NumaCollectorsError):
    """The other side closed the ring in an orderly way; nothing more will come."""


class PeerLostError(NumaCollectorsError):
    """The other side of a ring died without closing it."""


class SchemaMismatchError(NumaCollectorsError):
    """Two sides disagree on names, dtypes or shapes."""


class CheckpointError(NumaCollectorsError):
    """A checkpoint is missing, truncated, of another version, or contradicts the configuration."""


class ConfigError(NumaCollectorsError, ValueError):
    """The configuration is wrong; nothing was started and nothing was written."""
