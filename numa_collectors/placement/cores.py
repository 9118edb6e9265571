"""The cores that a process may use, node by node, and taking them so that L3 groups stay whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from numa_collectors.topo.model import Topology

__all__ = ["UsableCore", "cores_by_node", "covering", "num_cpus", "num_fitting", "take"]


@dataclass(frozen=True, slots=True)
class UsableCore:
    """The allowed CPUs of one core on one node.  ``l3`` numbers its cache group; -1 is no known cache."""

    cpus: tuple[int, ...]
    is_efficiency: bool
    l3: int

    @property
    def order(self) -> tuple[bool, int]:
        """Performance cores first, then rising CPU ids."""
        return (self.is_efficiency, self.cpus[0])


def cores_by_node(topology: Topology) -> dict[int, tuple[UsableCore, ...]]:
    """Return the usable cores of each node that has any, in the order in which they are handed out.

    A CPU that several nodes claim (``numa=fake``) counts on the lowest of them, so that it is handed out once.
    """
    node_of: dict[int, int] = {}
    for node in topology.nodes:
        for cpu in node.cpus:
            node_of.setdefault(cpu, node.id)
    l3_of = {cpu: index for index, group in enumerate(topology.l3) for cpu in group.cpus}
    allowed = set(topology.allowed)
    by_node: dict[int, list[UsableCore]] = {}
    for core in topology.cores:
        parts: dict[int, list[int]] = {}
        for cpu in core.cpus:
            if cpu in allowed and cpu in node_of:
                parts.setdefault(node_of[cpu], []).append(cpu)
        for node_id, cpus in parts.items():
            usable = UsableCore(tuple(cpus), core.kind == "efficiency", l3_of.get(cpus[0], -1))
            by_node.setdefault(node_id, []).append(usable)
    return {node: tuple(sorted(cores, key=lambda core: core.order)) for node, cores in sorted(by_node.items())}


def num_cpus(cores: Iterable[UsableCore]) -> int:
    return sum(len(core.cpus) for core in cores)


def covering(cores: Sequence[UsableCore], cpus: int) -> int:
    """Return how many of ``cores``, in order, hold ``cpus`` CPUs; one more than there are where all do not."""
    total = 0
    for count, core in enumerate(cores, start=1):
        total += len(core.cpus)
        if total >= cpus:
            return count
    return len(cores) + 1


def num_fitting(cores: Sequence[UsableCore], cpus_each: int | None) -> int:
    """Return how many workers of ``cpus_each`` CPUs (None: one core) fit without two of them on one core."""
    if cpus_each is None:
        return len(cores)
    fitting, held = 0, 0
    for core in cores:
        held += len(core.cpus)
        if held >= cpus_each:
            fitting, held = fitting + 1, 0
    return fitting


def take(free: list[UsableCore], count: int) -> list[UsableCore]:
    """Remove ``count`` cores from ``free`` and return them, from as few L3 groups as can be.

    The fullest use that still fits is preferred (the smallest group that holds them all), so that whole groups stay
    whole for those that come later; what is larger than any group takes the largest groups whole.
    """
    taken: list[UsableCore] = []
    while len(taken) < count:
        need = count - len(taken)
        groups: dict[int, list[UsableCore]] = {}
        for core in free:
            groups.setdefault(core.l3, []).append(core)
        fitting = [group for group in groups.values() if len(group) >= need]
        if fitting:
            chosen = min(fitting, key=lambda group: (_slow(group, need), len(group), group[0].cpus[0]))[:need]
        else:
            chosen = min(groups.values(), key=lambda group: (-len(group), _slow(group, need), group[0].cpus[0]))
        taken += chosen
        gone = set(chosen)
        free[:] = [core for core in free if core not in gone]
    return sorted(taken, key=lambda core: core.order)


def _slow(group: Sequence[UsableCore], need: int) -> int:
    return sum(core.is_efficiency for core in group[:need])
