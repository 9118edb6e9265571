"""What benchmarks may say from interleaved samples, and who had which CPUs meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil

from numa_collectors.topo import Topology


@dataclass(frozen=True)
class Comparison:
    """Ratios of one figure of two arms, one a round.  ``goal``: what the median is asked to reach."""

    text: str
    ratios: Sequence[float]
    goal: float | None = None

    @property
    def verdict(self) -> str:
        """What may be said; no gain and no loss is claimed where a round shows the contrary, or from under three rounds."""
        low, high = min(self.ratios), max(self.ratios)
        if self.goal is not None and low >= self.goal:
            return "met"
        if self.goal is not None and high < self.goal:
            return "not met"
        if self.goal is not None:
            reached = statistics.median(self.ratios) >= self.goal
            return "met by the median, not in every round" if reached else "not met by the median, met in some round"
        if len(self.ratios) < 3 or low <= 1.0 <= high:
            return "inside the noise"
        return "ahead" if low > 1.0 else "behind"

    def __str__(self) -> str:
        rounds = f"{len(self.ratios)} round{'s' * (len(self.ratios) > 1)}"
        asked = f", asked: {self.goal:g}" if self.goal is not None else ""
        spread = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {rounds}{asked}"
        return f"{self.verdict}: {self.text}: {statistics.median(self.ratios):.2f} times ({spread})"


def node_remark(topology: Topology) -> Iterator[str]:
    """Say what a machine with one node cannot show."""
    if not topology.is_numa:
        yield "this machine has one NUMA node: the effect of nodes was not measured, only that of separate cores"


class CpuMeter:
    """CPU seconds of a process and of those under it, by role and allowed CPUs; who appears later is found by :meth:`look`.

    Roles are the names that workers of the library give themselves; everything else is "other".
    """

    def __init__(self, pid: int | None = None, role: str = "learner") -> None:
        self._root = psutil.Process(pid)
        self._role = role
        self._seen: dict[psutil.Process, tuple[str, float]] = {}

    def look(self) -> None:
        """Note every process that is there, where it may run and its CPU time so far; costs milliseconds."""
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            self._note(process)

    def _note(self, process: psutil.Process) -> None:
        try:
            cpus, times, title = process.cpu_affinity() or [], process.cpu_times(), process.name()
        except psutil.NoSuchProcess:
            return
        named = title if title.startswith(("collector", "learner")) else "other"
        role = self._role if process == self._root else named
        self._seen[process] = (f"{role} on CPUs {','.join(map(str, cpus))}", times.user + times.system)

    def read(self) -> dict[str, float]:
        """Return the CPU seconds so far by role, of the processes that were seen."""
        if not self._seen:
            self.look()
        for process in list(self._seen):
            self._note(process)
        return self.last()

    def last(self) -> dict[str, float]:
        """Return the CPU seconds by role as they were when last noted, of processes that are gone too."""
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for name, cpu_s in self._seen.values():
            totals[name] = totals.get(name, 0.0) + cpu_s
            counts[name] = counts.get(name, 0) + 1
        return {(f"{counts[name]} x {name}" if counts[name] > 1 else name): cpu_s for name, cpu_s in totals.items()}
