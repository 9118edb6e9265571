"""From a topology and a request to a placement.

Order of attempts: whole cores for every collector with the learner's reservation as large as leaves them one each;
then single CPUs of shared cores; then, only where asked for, shared CPUs.  The first that fits is the answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from numa_collectors._cpulist import format_cpulist
from numa_collectors.errors import PlacementError
from numa_collectors.placement.cores import UsableCore, cores_by_node, covering, num_cpus, num_fitting, take
from numa_collectors.placement.model import Placement, PlacementRequest, WorkerPlacement, unbound
from numa_collectors.placement.nodes import choose_learner_node, memory_nodes, nearest_first, usable_nodes
from numa_collectors.placement.shortage import check_request, shortage
from numa_collectors.topo.model import Topology

__all__ = ["plan"]

# Two were the measured optimum on a 16-core host: 65.3 k against 59 k environment steps a second unseparated.
_LEARNER_CORES = 2


@dataclass(frozen=True, slots=True)
class _Attempt:
    """CPUs handed out: the learner's, and one ``(node, cpus)`` a collector."""

    learner: tuple[int, ...]
    collectors: tuple[tuple[int, tuple[int, ...]], ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    topology: Topology
    request: PlacementRequest
    cores: Mapping[int, tuple[UsableCore, ...]]
    learner_node: int
    # The nodes that collectors may use, the learner's first, then by distance from it.
    nodes: tuple[int, ...]


def plan(topology: Topology, request: PlacementRequest, env: Mapping[str, str] | None = None) -> Placement:
    """Return who runs where; ``PlacementError`` says what was asked, what is allowed and which set is short.

    ``env`` decides which GPUs are visible (default ``os.environ``); it is looked at only when ``learner_gpu`` is
    given.
    """
    check_request(topology, request)
    if not request.binds:
        reason = "one collector and nothing asked for: no binding, as without the library"
        return unbound(request.num_collectors, reason)
    cores = cores_by_node(topology)
    learner_node, reasons = choose_learner_node(topology, request, cores, os.environ if env is None else env)
    jobs = [
        _Job(topology, request, cores, learner_node, nearest_first(topology, learner_node, nodes))
        for nodes in usable_nodes(topology, request, cores)
    ]
    job, attempt = _first_that_fits(jobs)
    return _placement(job, attempt, (*reasons, *_machine_reasons(topology, attempt), *attempt.reasons))


def _first_that_fits(jobs: Sequence[_Job]) -> tuple[_Job, _Attempt]:
    """Try whole cores, with the learner's reservation shrinking last of all, then single CPUs of the widest set of nodes."""
    job = jobs[-1]
    asked = job.request.learner_cpus
    if asked is None:
        reservations = list(range(_LEARNER_CORES, -1, -1))
    else:
        reservations = [covering(job.cores[job.learner_node], asked) if asked else 0]
    for num_cores in reservations:
        for candidate in jobs:
            attempt = _whole_cores(candidate, num_cores)
            if attempt is not None:
                return candidate, attempt
    attempt = _single_cpus(job, reservations[-1])
    if attempt is None:
        raise PlacementError(shortage(job.topology, job.request, job.cores, job.nodes, job.learner_node))
    return job, attempt


def _whole_cores(job: _Job, learner_cores: int) -> _Attempt | None:
    """Give every worker cores of its own; None where they do not suffice."""
    if learner_cores > len(job.cores[job.learner_node]):
        return None
    free = {node: list(cores) for node, cores in job.cores.items()}
    learner = _learner_cpus(job, take(free[job.learner_node], learner_cores))
    cpus_each = job.request.cpus_per_collector
    budget = job.topology.cpu_budget - len(learner)
    counts = _counts(job, free, cpus_each)
    if counts is None or (cpus_each or 1) * job.request.num_collectors > budget:
        return None
    reasons = []
    sizes = _even_sizes(job, free, counts)
    if cpus_each is None and _total_cpus(free, sizes) > budget:
        cpus_each = _budget_share(job, budget)
        reasons.append(
            f"the CPU budget is {job.topology.cpu_budget} of {len(job.topology.allowed)} allowed CPUs (cgroup quota): "
            f"{cpus_each} CPUs a collector, since more would only be throttled"
        )
        # A smaller share may let more fit on a node, never fewer.
        counts = _counts(job, free, cpus_each) or counts
    collectors = _take_cores(free, counts, sizes) if cpus_each is None else _take_cpus(free, counts, cpus_each)
    reasons.append(_learner_reason(job, learner_cores, learner))
    reasons.append(_size_reason(collectors, free, cpus_each is not None))
    return _Attempt(learner, tuple(collectors), tuple(reasons))


def _learner_cpus(job: _Job, cores: Sequence[UsableCore]) -> tuple[int, ...]:
    cpus = [cpu for core in cores for cpu in core.cpus]
    asked = job.request.learner_cpus
    return tuple(sorted(cpus if asked is None else cpus[:asked]))


def _counts(
    job: _Job, free: Mapping[int, Sequence[UsableCore]], cpus_each: int | None, whole: bool = True
) -> list[int] | None:
    """Return the node of each collector, by rank; None where they do not fit (``whole``: without sharing a core)."""
    capacity = {}
    room = {}
    for node in job.nodes:
        if whole:
            capacity[node], room[node] = num_fitting(free[node], cpus_each), len(free[node])
        else:
            capacity[node] = num_cpus(free[node]) // (cpus_each or 1)
            room[node] = num_cpus(free[node])
    number = job.request.num_collectors
    asked = job.request.numa_nodes
    if isinstance(asked, tuple):
        chosen = [asked[rank % len(asked)] for rank in range(number)]
        return chosen if all(chosen.count(node) <= capacity[node] for node in set(chosen)) else None
    return _spread(job.nodes, number, capacity, room)


def _spread(
    nodes: Sequence[int], number: int, capacity: Mapping[int, int], room: Mapping[int, int]
) -> list[int] | None:
    """Give each collector the node where its share will be largest, of equal ones the nearest to the learner."""
    if sum(capacity.values()) < number:
        return None
    # With fewer collectors than nodes each gets a node of its own, nearest first; a node with little room is passed
    # over.
    roomy = [node for node in nodes if capacity[node] and 2 * room[node] >= max(room.values())]
    if number <= len(roomy):
        return roomy[:number]
    counts = dict.fromkeys(nodes, 0)
    chosen = []
    for _ in range(number):
        open_nodes = [node for node in nodes if counts[node] < capacity[node]]
        node = max(open_nodes, key=lambda node: room[node] / (counts[node] + 1))
        counts[node] += 1
        chosen.append(node)
    return chosen


def _even_sizes(job: _Job, free: Mapping[int, Sequence[UsableCore]], counts: Sequence[int]) -> list[int]:
    """Return each collector's number of cores: all alike, or one more where its node has cores to spare."""
    smallest = min(len(free[node]) // counts.count(node) for node in set(counts))
    spare = {node: len(free[node]) - smallest * counts.count(node) for node in set(counts)}
    sizes = []
    for node in counts:
        extra = 1 if spare[node] > 0 else 0
        spare[node] -= extra
        sizes.append(smallest + extra)
    return sizes


def _total_cpus(free: Mapping[int, Sequence[UsableCore]], sizes: Sequence[int]) -> int:
    """Return an upper bound of the CPUs that collectors of these sizes hold."""
    widest = max((len(core.cpus) for cores in free.values() for core in cores), default=1)
    return min(sum(sizes) * widest, sum(num_cpus(cores) for cores in free.values()))


def _budget_share(job: _Job, budget: int) -> int:
    share = budget // job.request.num_collectors
    widest = max(len(core.cpus) for cores in job.cores.values() for core in cores)
    return share - share % widest if share > widest else share


def _take_cores(
    free: dict[int, list[UsableCore]], counts: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Hand out cores, the larger shares first: they are the harder ones to fit into whole L3 groups."""
    taken: dict[int, tuple[int, ...]] = {}
    for rank in sorted(range(len(counts)), key=lambda rank: (-sizes[rank], rank)):
        # The one core more is not worth a foot in another cache.
        spare = sizes[rank] > min(sizes) and _num_caches(free[counts[rank]], sizes[rank]) > _num_caches(
            free[counts[rank]], sizes[rank] - 1
        )
        cores = take(free[counts[rank]], sizes[rank] - spare)
        taken[rank] = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    return [(node, taken[rank]) for rank, node in enumerate(counts)]


def _num_caches(free: Sequence[UsableCore], count: int) -> int:
    """Return how many L3 groups ``count`` cores taken now would lie on."""
    return len({core.l3 for core in take(list(free), count)})


def _take_cpus(
    free: dict[int, list[UsableCore]], counts: Sequence[int], cpus_each: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Hand out ``cpus_each`` CPUs a collector from cores of its own; a CPU left over on one of them stays idle."""
    collectors = []
    for node in counts:
        cores = take(free[node], covering(free[node], cpus_each))
        cpus = [cpu for core in cores for cpu in core.cpus]
        collectors.append((node, tuple(sorted(cpus[:cpus_each]))))
    return collectors


def _single_cpus(job: _Job, learner_cores: int) -> _Attempt | None:
    """Let collectors share cores, and CPUs too where that was asked for; the learner keeps what was asked for it."""
    if learner_cores > len(job.cores[job.learner_node]):
        return None
    free = {node: list(cores) for node, cores in job.cores.items()}
    learner = _learner_cpus(job, take(free[job.learner_node], learner_cores))
    cpus_each = job.request.cpus_per_collector or 1
    within_budget = cpus_each * job.request.num_collectors <= job.topology.cpu_budget - len(learner)
    counts = _counts(job, free, job.request.cpus_per_collector, whole=False) if within_budget else None
    reason = "there are more collectors than cores: SMT siblings of one core go to different collectors"
    if counts is None:
        if not job.request.oversubscribe:
            return None
        counts = _shared_nodes(job, free)
        reason = "there are more workers than CPUs, and oversubscription was asked for: collectors share CPUs"
        if any(not free[node] for node in counts):
            return None
    cpus_of = {node: [cpu for core in cores for cpu in core.cpus] for node, cores in free.items()}
    collectors = []
    seen: dict[int, int] = {}
    for node in counts:
        cpus = cpus_of[node]
        width = min(cpus_each, len(cpus))
        start = seen.get(node, 0)
        seen[node] = start + width
        collectors.append((node, tuple(sorted(cpus[(start + offset) % len(cpus)] for offset in range(width)))))
    return _Attempt(learner, tuple(collectors), (_learner_reason(job, learner_cores, learner), reason))


def _shared_nodes(job: _Job, free: Mapping[int, Sequence[UsableCore]]) -> list[int]:
    number = job.request.num_collectors
    if isinstance(job.request.numa_nodes, tuple):
        return [job.request.numa_nodes[rank % len(job.request.numa_nodes)] for rank in range(number)]
    room = {node: num_cpus(free[node]) for node in job.nodes}
    return _spread(job.nodes, number, {node: number if room[node] else 0 for node in job.nodes}, room) or []


def _placement(job: _Job, attempt: _Attempt, reasons: Sequence[str]) -> Placement:
    def worker(role: str, rank: int, node: int, cpus: tuple[int, ...]) -> WorkerPlacement:
        return WorkerPlacement(role, rank, node, cpus, memory_nodes(job.topology, node), len(cpus))

    # Without CPUs of its own the learner runs anywhere, but with no more threads than CPUs that no collector has: pools
    # sized by the machine fight the collectors for every core (a small network's update took 18 times as long).
    spare = len(set(job.topology.allowed).difference(*(cpus for _, cpus in attempt.collectors)))
    learner = WorkerPlacement("learner", 0, num_threads=max(1, spare))
    if attempt.learner:
        learner = worker("learner", 0, job.learner_node, attempt.learner)
    collectors = tuple(worker("collector", rank, node, cpus) for rank, (node, cpus) in enumerate(attempt.collectors))
    return Placement(learner, collectors, tuple(dict.fromkeys(reasons)))


def _machine_reasons(topology: Topology, attempt: _Attempt) -> list[str]:
    reasons = []
    allowed = set(topology.allowed)
    hidden = [node.id for node in topology.numa_nodes if allowed.isdisjoint(node.cpus)]
    if hidden:
        reasons.append(f"node {format_cpulist(hidden)} has CPUs, but none that this process may use")
    for node_id in sorted({node for node, _ in attempt.collectors}):
        targets = memory_nodes(topology, node_id)
        if targets is not None and node_id not in targets:
            distance = topology.distance(node_id, targets[0])
            far = "" if distance is None else f" at distance {distance}"
            reasons.append(f"node {node_id} has no memory of its own to use: the nearest is on node {targets[0]}{far}")
    if not topology.is_numa:
        reasons.append("one node has CPUs and memory: binding keeps workers apart, memory is local anyway")
    return reasons


def _learner_reason(job: _Job, num_cores: int, cpus: Sequence[int]) -> str:
    if cpus:
        cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
        return f"the learner has {cores} of node {job.learner_node} to itself (CPUs {format_cpulist(cpus)})"
    if job.request.learner_cpus == 0:
        return "no CPUs were to be reserved for the learner: it shares all allowed CPUs"
    return "no core is left for the learner: it shares all allowed CPUs with the collectors"


def _size_reason(
    collectors: Sequence[tuple[int, tuple[int, ...]]], free: Mapping[int, Sequence[UsableCore]], fixed: bool
) -> str:
    widths = sorted({len(cpus) for _, cpus in collectors})
    width = " or ".join(map(str, widths))
    idle = [cpu for cores in free.values() for core in cores for cpu in core.cpus]
    unit = "CPU" if widths == [1] else "CPUs"
    text = f"each collector has {width} {unit} on cores of its own" + ("" if fixed else ", alike to within one core")
    return text + (f"; CPUs {format_cpulist(idle)} stay free" if idle else "")
