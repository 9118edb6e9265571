"""The rules of placement, on named machines and as properties over all of them."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from numa_collectors.errors import PlacementError
from numa_collectors.placement import Placement, PlacementRequest, WorkerPlacement, local_share, plan
from numa_collectors.testing.machines import MACHINES, archived_topology, topology_of
from numa_collectors.topo import Topology

ARCHIVES = sorted((Path(__file__).resolve().parents[3] / "shared" / "machines").glob("*.tar.xz"))
NAMES = [*MACHINES, *(path.name.removesuffix(".tar.xz") for path in ARCHIVES)]


def machine(name: str) -> Topology:
    return topology_of(name) if name in MACHINES else archived_topology(ARCHIVES[NAMES.index(name) - len(MACHINES)])


def bound(placement: Placement) -> list[WorkerPlacement]:
    return [worker for worker in placement.workers if worker.cpus is not None]


def first_nodes(topology: Topology) -> dict[int, int]:
    """Return the node of each CPU; the lowest where several claim it."""
    nodes: dict[int, int] = {}
    for node in topology.nodes:
        for cpu in node.cpus:
            nodes.setdefault(cpu, node.id)
    return nodes


def usable_cores(topology: Topology) -> list[tuple[int, ...]]:
    """Return the allowed part of each core, split where a core lies on several nodes."""
    nodes, allowed = first_nodes(topology), set(topology.allowed)
    parts: dict[tuple[int, int], list[int]] = {}
    for index, core in enumerate(topology.cores):
        for cpu in core.cpus:
            if cpu in allowed and cpu in nodes:
                parts.setdefault((index, nodes[cpu]), []).append(cpu)
    return [tuple(cpus) for cpus in parts.values()]


def check_bounds(topology: Topology, placement: Placement) -> None:
    """Never wider than allowed, on one node each, memory where host memory may be used."""
    nodes = first_nodes(topology)
    kinds = {node.id: node.kind for node in topology.nodes}
    for worker in bound(placement):
        assert worker.cpus
        assert list(worker.cpus) == sorted(set(worker.cpus))
        assert set(worker.cpus) <= set(topology.allowed)
        assert {nodes[cpu] for cpu in worker.cpus} == {worker.node}
        assert worker.num_threads == len(worker.cpus)
        if worker.memory_nodes is not None:
            assert all(node in topology.nodes_allowed for node in worker.memory_nodes)
            assert all(kinds[node] in ("normal", "memory-only") for node in worker.memory_nodes)
            if worker.node in topology.nodes_allowed and kinds[worker.node] == "normal":
                assert worker.memory_nodes == (worker.node,)


def whole_cores_would_do(topology: Topology, cores: list[tuple[int, ...]], placement: Placement) -> bool:
    """Whether every collector could have had cores of its own, judged where all cores have as many threads."""
    threads = {len(core) for core in cores}
    if len(threads) > 1 or topology.cpu_budget < len(topology.allowed):
        return False
    each = -(-len(placement.collectors[0].cpus or ()) // threads.pop())
    nodes = first_nodes(topology)
    per_node = Counter(nodes[core[0]] for core in cores)
    return sum(count // each for count in per_node.values()) >= len(placement.collectors)


def check_cores(topology: Topology, placement: Placement) -> None:
    """No CPU twice, no core twice while one is free, sizes alike to within one core, whole L3 groups where they fit."""
    taken = Counter(cpu for worker in bound(placement) for cpu in worker.cpus or ())
    assert max(taken.values()) == 1
    assert len(taken) <= topology.cpu_budget
    cores = usable_cores(topology)
    owners = {
        core: {worker.name for worker in bound(placement) if set(worker.cpus or ()) & set(core)} for core in cores
    }
    shared = [core for core, names in owners.items() if len(names) > 1]
    sizes = [sum(worker.name in names for names in owners.values()) for worker in placement.collectors]
    if shared:
        assert not whole_cores_would_do(topology, cores, placement)
        return
    assert max(sizes) - min(sizes) <= 1
    group_of = {cpu: index for index, group in enumerate(topology.l3) for cpu in group.cpus}
    nodes = first_nodes(topology)
    free: Counter[tuple[int, int]] = Counter(
        (nodes[core[0]], group_of.get(core[0], -1)) for core, names in owners.items() if not names
    )
    for worker, size in zip(placement.collectors, sizes, strict=True):
        groups = {group_of.get(cpu, -1) for cpu in worker.cpus or ()}
        fitting = [group for (node, group), count in free.items() if node == worker.node and count >= size]
        assert len(groups) == 1 or not fitting, f"{worker.name} spans {len(groups)} L3 groups, though one had room"


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(NAMES),
    number=st.integers(1, 64),
    cpus=st.none() | st.integers(1, 12),
    gpu=st.none() | st.just(0),
)
@example(name="epyc-nps4-8gpu", number=64, cpus=None, gpu=0)
@example(name="cpus-2048", number=64, cpus=None, gpu=None)
@example(name="half-cores", number=6, cpus=None, gpu=None)
@example(name="cgroup2-nested", number=6, cpus=None, gpu=None)
def test_properties(name: str, number: int, cpus: int | None, gpu: int | None) -> None:
    topology = machine(name)
    request = PlacementRequest(number, numa_nodes="auto", cpus_per_collector=cpus, learner_gpu=gpu)
    usable = min(sum(map(len, usable_cores(topology))), topology.cpu_budget)
    try:
        placement = plan(topology, request, {})
    except PlacementError:
        # Several CPUs each may not fit on the nodes one by one; single ones always do, up to the last.
        assert number * (cpus or 1) > usable or cpus is not None
        return
    assert placement == plan(topology, request, {})
    assert [worker.rank for worker in placement.collectors] == list(range(number))
    check_bounds(topology, placement)
    check_cores(topology, placement)
    if cpus is not None:
        assert {len(worker.cpus or ()) for worker in placement.collectors} == {cpus}
    text = placement.explain()
    assert all(worker.name in text for worker in placement.workers)
    assert len(placement.reasons) >= 2


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(NAMES), number=st.integers(1, 64))
def test_oversubscription_always_fits(name: str, number: int) -> None:
    topology = machine(name)
    placement = plan(topology, PlacementRequest(number, numa_nodes="auto", oversubscribe=True), {})
    check_bounds(topology, placement)
    loads = Counter(cpu for worker in placement.collectors for cpu in worker.cpus or ())
    if len(topology.nodes) == 1:
        assert max(loads.values()) - min(loads.values()) <= 1


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(NAMES), world=st.integers(1, 8))
def test_local_shares_are_disjoint(name: str, world: int) -> None:
    topology = machine(name)
    if len(usable_cores(topology)) < world:
        with pytest.raises(PlacementError, match="share"):
            local_share(topology, 0, world, {})
        return
    shares = [local_share(topology, rank, world, {}) for rank in range(world)]
    cpus = Counter(cpu for share in shares for cpu in share.allowed)
    assert max(cpus.values()) == 1
    if world > 1:
        assert set(cpus) == {cpu for core in usable_cores(topology) for cpu in core}
    for share in shares:
        check_bounds(share, plan(share, PlacementRequest(1, numa_nodes="auto"), {}))


def test_ranks_whose_gpu_is_on_a_node_without_usable_cpus_still_get_shares_of_their_own() -> None:
    topology = machine("nvidiagpunumanodes")
    shares = [local_share(topology, rank, 4, {}) for rank in range(4)]
    homes = {gpu.node for gpu in topology.visible_gpus({})[:4]}
    assert not homes <= {node.id for node in topology.nodes if set(node.cpus) & set(topology.allowed)}
    cpus = [cpu for share in shares for cpu in share.allowed]
    assert len(cpus) == len(set(cpus)) == len(topology.allowed)


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_asked_is_nothing_bound(name: str) -> None:
    placement = plan(topology_of(name), PlacementRequest(learner_gpu=3), {})
    assert not placement.bound
    assert placement.collectors == (WorkerPlacement("collector", 0),)


def test_learner_near_its_gpu() -> None:
    topology = topology_of("epyc-nps4-8gpu")
    for gpu, node in enumerate((3, 2, 1, 0, 7, 6, 5, 4)):
        placement = plan(topology, PlacementRequest(8, learner_gpu=gpu), {})
        assert placement.learner.node == node
        assert placement.learner.num_threads == 4
    placement = plan(topology, PlacementRequest(8, learner_gpu=1), {"CUDA_VISIBLE_DEVICES": "6,5"})
    assert placement.learner.node == 6
    assert {worker.node for worker in placement.collectors} == set(range(8))


def test_fewer_collectors_than_nodes_start_at_the_learner() -> None:
    placement = plan(topology_of("epyc-nps4-8gpu"), PlacementRequest(3, learner_gpu=4), {})
    assert [worker.node for worker in placement.collectors] == [7, 4, 5]


def test_whole_l3_groups() -> None:
    topology = topology_of("epyc-nps1")
    placement = plan(topology, PlacementRequest(14, cpus_per_collector=16), {})
    groups = {group.cpus for group in topology.l3}
    assert {worker.cpus for worker in placement.collectors} <= groups


def test_one_core_more_does_not_reach_into_another_cache() -> None:
    topology = topology_of("epyc-nps4-8gpu")
    placement = plan(topology, PlacementRequest(12, learner_gpu=2), {})
    group_of = {cpu: index for index, group in enumerate(topology.l3) for cpu in group.cpus}
    caches = [{group_of[cpu] for cpu in worker.cpus or ()} for worker in placement.collectors]
    assert [len(groups) for groups in caches] == [1] * 12


def test_performance_cores_first() -> None:
    placement = plan(topology_of("intel-hybrid"), PlacementRequest(2, cpus_per_collector=4, learner_cpus=4), {})
    assert placement.learner.cpus == (0, 1, 2, 3)
    assert [worker.cpus for worker in placement.collectors] == [(4, 5, 6, 7), (8, 9, 10, 11)]
    arm = plan(topology_of("arm-big-little"), PlacementRequest(3), {})
    assert arm.learner.cpus == (4, 5)
    assert arm.collectors[0].cpus == (6, 7)


def test_nodes_as_listed() -> None:
    placement = plan(topology_of("sparse-ids"), PlacementRequest(5, numa_nodes=(256, 0)), {})
    assert [worker.node for worker in placement.collectors] == [256, 0, 256, 0, 256]
    assert [worker.memory_nodes for worker in placement.collectors[:2]] == [(256,), (0,)]


def test_memory_of_a_node_without_any() -> None:
    placement = plan(topology_of("threadripper-2990wx"), PlacementRequest(2, numa_nodes=(1, 3)), {})
    assert [worker.memory_nodes for worker in placement.collectors] == [(0,), (0,)]
    assert any("no memory of its own" in reason for reason in placement.reasons)
    auto = plan(topology_of("threadripper-2990wx"), PlacementRequest(4), {})
    assert {worker.node for worker in auto.collectors} == {0, 2}


def test_memory_outside_the_cpuset() -> None:
    placement = plan(topology_of("cpuset-hides-memory"), PlacementRequest(2, numa_nodes=(0, 1)), {})
    assert [worker.memory_nodes for worker in placement.collectors] == [(0,), (0,)]
    auto = plan(topology_of("cpuset-hides-memory"), PlacementRequest(4), {})
    assert {worker.node for worker in auto.collectors} == {0}
    crowded = plan(topology_of("cpuset-hides-memory"), PlacementRequest(9), {})
    assert {worker.node for worker in crowded.collectors} == {0, 1}
    assert any("node 1 has no memory of its own to use" in reason for reason in crowded.reasons)


def test_device_memory_is_never_host_memory() -> None:
    placement = plan(topology_of("gb200"), PlacementRequest(8, learner_gpu=2), {})
    assert {worker.memory_nodes for worker in placement.workers} == {(0,), (1,)}
    assert placement.learner.node == 1
    assert {worker.memory_nodes for worker in plan(topology_of("gh200"), PlacementRequest(4), {}).workers} == {None}


def test_quota_narrows() -> None:
    placement = plan(topology_of("cgroup2-nested"), PlacementRequest(2), {})
    assert sum(len(worker.cpus or ()) for worker in placement.workers) <= 6
    assert any("quota" in reason for reason in placement.reasons)
    with pytest.raises(PlacementError, match="CPU budget is short"):
        plan(topology_of("cgroup2-nested"), PlacementRequest(7), {})


def test_two_cores_two_collectors() -> None:
    topology = topology_of("half-cores").restricted([0, 1])
    placement = plan(topology, PlacementRequest(2), {})
    assert placement.learner.cpus is None
    assert placement.learner.num_threads == 1
    assert [worker.cpus for worker in placement.collectors] == [(0,), (1,)]
    assert any("shares all allowed CPUs" in reason for reason in placement.reasons)
    one_left = plan(topology_of("half-cores").restricted([0, 1, 2]), PlacementRequest(2), {})
    assert one_left.learner.num_threads == 1


def test_more_collectors_than_cores_split_siblings() -> None:
    placement = plan(topology_of("power-smt8"), PlacementRequest(64), {})
    assert any("SMT siblings" in reason for reason in placement.reasons)
    assert len({cpu for worker in placement.collectors for cpu in worker.cpus or ()}) == 64


@pytest.mark.parametrize(
    ("name", "request_", "match"),
    [
        ("epyc-nps1", PlacementRequest(0), "num_collectors of at least 1, got 0"),
        ("epyc-nps1", PlacementRequest(2, cpus_per_collector=0), "cpus_per_collector of at least 1"),
        ("epyc-nps1", PlacementRequest(2, numa_nodes=()), "empty list"),
        ("epyc-nps1", PlacementRequest(2, numa_nodes=(0, 2)), "got 2, which does not exist"),
        (
            "epyc-nps1",
            PlacementRequest(2, learner_node=9),
            "learner_node: expected nodes that can hold workers .*, got 9",
        ),
        ("cxl-expander", PlacementRequest(2, numa_nodes=(2,)), "memory only and has no CPUs"),
        ("gb200", PlacementRequest(2, numa_nodes=(2,)), "device's memory"),
        ("gb200", PlacementRequest(2, numa_nodes=(3,)), "is empty"),
        ("cgroup1-limits", PlacementRequest(2, numa_nodes=(0,)), "this process may not use"),
        ("epyc-nps1", PlacementRequest(1, cpus_per_collector=200), "single nodes are short"),
        (
            "epyc-nps1",
            PlacementRequest(300),
            r"asked for 300 collectors x 1 CPU; allowed: CPUs 0-255 .* allowed CPUs are short",
        ),
        ("one-cpu", PlacementRequest(2), "allowed CPUs are short: 1"),
        ("epyc-nps1", PlacementRequest(2, learner_cpus=200), "single nodes are short"),
        ("gh200", PlacementRequest(2, learner_gpu=1), "visible GPUs are 0008:01:00.0"),
    ],
)
def test_refusals(name: str, request_: PlacementRequest, match: str) -> None:
    with pytest.raises(PlacementError, match=match):
        plan(topology_of(name), request_, {})


def test_gpu_that_environment_hides() -> None:
    with pytest.raises(PlacementError, match="visible GPUs are none"):
        plan(topology_of("gh200"), PlacementRequest(2, learner_gpu=0), {"CUDA_VISIBLE_DEVICES": ""})


def test_unknown_gpu_node_is_said() -> None:
    placement = plan(topology_of("gpu-unknown-node"), PlacementRequest(2, learner_gpu=1), {})
    assert any("does not know the node of GPU 1" in reason for reason in placement.reasons)
    none = plan(topology_of("epyc-nps1"), PlacementRequest(2, learner_gpu=0), {})
    assert any("no GPU is listed" in reason for reason in none.reasons)


def test_placement_is_picklable_and_named() -> None:
    placement = plan(topology_of("epyc-nps2"), PlacementRequest(2), {})
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert [worker.name for worker in placement.workers] == ["learner", "collector[0]", "collector[1]"]
    assert placement.collectors[0].memory_node == placement.collectors[0].node
