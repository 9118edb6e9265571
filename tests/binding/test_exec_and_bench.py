"""Becoming a bound program, requests for a node, a GPU or CPUs, and the benchmark's plumbing and verdicts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from numa_collectors import _mempolicy, _nodes, binding
from numa_collectors.binding import BenchPair, BindRequest, _bench
from numa_collectors.errors import PlacementError, TopologyError
from numa_collectors.topo import Topology
from numa_collectors.topo.model import Distances, Node

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not _mempolicy.supported(), reason="needs memory policies")

CPU = max(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
NODE = (_nodes.nodes_of_cpus((CPU,)) or (0,))[0]
GIB = 1 << 30

EXEC = f"""
import sys
from numa_collectors import binding
request = binding.BindRequest(cpus=({CPU},), memory_nodes=({NODE},), policy="bind", num_threads=1)
try:
    binding.exec_bound(["no such program"], request)
except FileNotFoundError:
    import os
    assert len(os.sched_getaffinity(0)) >= 1 and binding.inspect(binding.BindRequest()).policy == "default"
inside = '''
import json, os
from numa_collectors import binding
report = binding.inspect(binding.BindRequest(cpus=({CPU},), memory_nodes=({NODE},), policy="bind"))
print(json.dumps([report.to_dict(), os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"]]))
'''
binding.exec_bound([sys.executable, "-c", inside], request)
"""


def test_program_is_born_bound_with_its_thread_caps(child: Callable[..., Any]) -> None:
    report, omp, mkl = child(EXEC, env={"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": ""})
    assert (report["applied"], report["verified"], report["policy"]) == ("policy+cpu", True, "bind")
    assert report["cpus"] == [CPU]
    assert (omp, mkl) == ("7", "1")


def test_no_command() -> None:
    with pytest.raises(ValueError, match="got none"):
        binding.exec_bound([], BindRequest())


def machine() -> Topology:
    """Node 0 normal, node 1 cpu-only (nearer to node 2), node 2 memory-only; CPU 3 is not ours."""
    base = Topology.discover()
    nodes = (
        Node(0, "normal", (0, 1), GIB, GIB),
        Node(1, "cpu-only", (2, 3)),
        Node(2, "memory-only", (), GIB, GIB // 2),
    )
    distances = Distances((0, 1, 2), ((10, 30, 20), (30, 10, 15), (20, 15, 10)))
    from dataclasses import replace

    return replace(base, nodes=nodes, distances=distances, online=(0, 1, 2, 3), allowed=(0, 1, 2), nodes_allowed=(0, 2))


def test_requests_for_nodes_and_cpus() -> None:
    topology = machine()
    asked = {
        0: ((0, 1), (0,)),
        1: ((2,), (2,)),
        2: (None, (2,)),
    }
    for node, (cpus, memory) in asked.items():
        request = binding.request_for(topology, node=node)
        assert (request.cpus, request.memory_nodes) == (cpus, memory)
        assert request.num_threads == (len(cpus) if cpus else None)
    request = binding.request_for(topology, cpus=(1, 2), policy="bind")
    assert (request.cpus, request.memory_nodes, request.policy) == ((1, 2), (0, 2), "bind")


def test_requests_that_cannot_be_had() -> None:
    topology = machine()
    with pytest.raises(TopologyError, match="got 9"):
        binding.request_for(topology, node=9)
    with pytest.raises(PlacementError, match="0 visible GPUs, got gpu:0"):
        binding.request_for(topology, gpu=0, env={})
    with pytest.raises(PlacementError, match="none of them"):
        binding.request_for(topology)
    from dataclasses import replace

    with pytest.raises(PlacementError, match="may use"):
        binding.request_for(replace(topology, allowed=(2,)), node=0)
    with pytest.raises(PlacementError, match="node with memory"):
        binding.request_for(replace(topology, nodes_allowed=()), node=0)


def test_capacity_by_a_topology() -> None:
    topology = machine()
    binding.check_capacity(topology, 2, GIB // 4)
    binding.check_capacity(topology, None, GIB + GIB // 4)
    for node, need in ((2, GIB), (1, 1), (None, 2 * GIB)):
        with pytest.raises(MemoryError, match="left"):
            binding.check_capacity(topology, node, need)


def test_one_node_has_nothing_to_win() -> None:
    if len(_nodes.memory_nodes()) > 1:
        pytest.skip("this machine has several nodes")
    report = binding.bench(Topology.discover())
    assert report.pairs == ()
    assert "nothing to win" in str(report)


def test_measuring_gives_figures_and_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(_bench, "_CHAIN_BYTES", 1 << 20)
    monkeypatch.setattr(_bench, "_LEAST_S", 0.001)
    pair = _bench._pair(NODE, (CPU,), NODE)
    assert pair.is_local
    assert pair.bandwidth_gb_s > 0
    assert pair.latency_ns >= 0


def test_chain_visits_every_place_once() -> None:
    words = memoryview(bytearray(64 * _bench._CHAIN_STEP_BYTES)).cast("Q")
    _bench._write_chain(words, 64)
    place, seen = 0, set()
    for _ in range(64):
        seen.add(place)
        place = words[place]
    assert place == 0
    assert len(seen) == 64


def test_verdicts() -> None:
    local, remote = BenchPair(0, 0, 20.0, 90.0), BenchPair(0, 1, 12.0, 150.0)
    assert "1.67x the latency (90 -> 150 ns, node 0 to 1)" in _bench.verdict([local, remote])
    assert "60 % of the copy bandwidth" in _bench.verdict([local, remote])
    assert "next to nothing" in _bench.verdict([local, BenchPair(0, 1, 20.0, 91.0)])
    assert "nothing to compare" in _bench.verdict([local])
    table = str(binding.BenchReport((local, remote), "verdict", ("node 1 to node 0: not measured",)))
    assert "remote" in table.splitlines()[2]
    assert table.endswith("verdict")


def topo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "numa_collectors.topo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_command_line_becomes_the_command() -> None:
    show = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OPENBLAS_NUM_THREADS']); raise SystemExit(7)"
    result = topo("--exec", "--cpus", str(CPU), "--policy", "bind", "--require", "--", sys.executable, "-c", show)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (7, f"[{CPU}] 1", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--exec", "--node", "999", "--", "true"], 2, "999"),
        (["--exec", "--cpus", "0-x", "--", "true"], 2, "--cpus"),
        (["--exec", "--cpus", "99999", "--", "true"], 2, "99999"),
        (["--exec", "--node", "0", "--", "no such command"], 127, "no such command"),
        (["--exec", "--", "true"], 2, "one of --near"),
        (["--exec", "--node", "0"], 2, "a command after --"),
        (["--node", "0"], 2, "need --exec"),
        (["--bench", "--load", "/dev/null"], 2, "topo"),
        (["rubbish"], 2, "unrecognized arguments: rubbish"),
    ],
)
def test_command_line_mistakes(arguments: list[str], code: int, words: str) -> None:
    result = topo(*arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert words in result.stderr
    assert "Traceback" not in result.stderr
