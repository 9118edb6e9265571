"""What is asked for, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from numa_collectors._cpulist import format_cpulist

__all__ = ["Placement", "PlacementRequest", "WorkerPlacement", "unbound"]


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a run asks of the machine; with nothing but one collector asked, nothing is bound.

    ``numa_nodes``: a tuple (collector i gets entry i modulo its length) or ``"auto"`` (the default once binding is
    on). ``cpus_per_collector`` and ``learner_cpus`` count logical CPUs.  ``learner_cpus=None`` reserves two whole
    cores where enough are left, ``0`` reserves none.  ``learner_gpu`` is an ordinal among the visible GPUs, as CUDA
    counts them. ``oversubscribe`` lets workers share CPUs once there are more workers than CPUs.
    """

    num_collectors: int = 1
    numa_nodes: tuple[int, ...] | Literal["auto"] | None = None
    cpus_per_collector: int | None = None
    learner_node: int | None = None
    learner_gpu: int | None = None
    learner_cpus: int | None = None
    oversubscribe: bool = False

    @property
    def binds(self) -> bool:
        """Whether anything was asked for that needs binding."""
        asked = (self.numa_nodes, self.cpus_per_collector, self.learner_node, self.learner_cpus)
        return self.num_collectors > 1 or any(value is not None for value in asked)


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """Where one worker goes; None means left as it is.

    ``memory_nodes`` is None also where the machine has memory on one node only: there is nothing to choose.
    """

    role: str
    rank: int
    node: int | None = None
    cpus: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None
    num_threads: int | None = None

    @property
    def name(self) -> str:
        """``learner`` or ``collector[3]``."""
        return self.role if self.role == "learner" else f"{self.role}[{self.rank}]"

    @property
    def memory_node(self) -> int | None:
        """The node that this worker's memory, and the ring it writes, belong on; None where it does not matter."""
        return self.memory_nodes[0] if self.memory_nodes else None


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision, with its ``reasons`` in words."""

    learner: WorkerPlacement
    collectors: tuple[WorkerPlacement, ...]
    reasons: tuple[str, ...]

    @property
    def bound(self) -> bool:
        """Whether any worker is bound."""
        return any(worker.cpus is not None for worker in self.workers)

    @property
    def workers(self) -> tuple[WorkerPlacement, ...]:
        """The learner, then the collectors by rank."""
        return (self.learner, *self.collectors)

    def explain(self) -> str:
        """Return the placement as a table followed by its reasons, one a line."""
        rows = [("worker", "node", "CPUs", "threads", "memory")]
        rows += [_row(worker) for worker in self.workers]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, "", "why:", *(f"  - {reason}" for reason in self.reasons)])


def unbound(num_collectors: int, reason: str) -> Placement:
    """Return the placement that leaves every worker where the kernel puts it."""
    collectors = tuple(WorkerPlacement("collector", rank) for rank in range(num_collectors))
    return Placement(WorkerPlacement("learner", 0), collectors, (reason,))


def _row(worker: WorkerPlacement) -> tuple[str, str, str, str, str]:
    if worker.cpus is None:
        return (worker.name, "-", "unbound", "-", "-")
    node = "-" if worker.node is None else str(worker.node)
    memory = "any" if worker.memory_nodes is None else "node " + format_cpulist(worker.memory_nodes)
    return (worker.name, node, format_cpulist(worker.cpus), str(worker.num_threads), memory)
