"""Memory is reckoned before anything starts: by node, together, and against the cgroup's limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from numa_collectors.errors import NodeCapacityError
from numa_collectors.pool import MemoryPlan, check_memory
from numa_collectors.topo import Topology
from numa_collectors.trainer._explain import explain
from tests.trainer.toys import toy_trainer

GIB = 1 << 30


def two_nodes(limit_left_bytes: int | None = None) -> Topology:
    """Return two nodes with 8 GiB free on each."""
    topology = Topology.discover()
    node = replace(topology.nodes[0], memory_bytes=16 * GIB, free_bytes=8 * GIB, reclaimable_bytes=0)
    nodes = (replace(node, id=0), replace(node, id=1))
    return replace(topology, nodes=nodes, nodes_allowed=(0, 1), memory_headroom_bytes=limit_left_bytes)


def rings(*sizes_gib: int) -> list[MemoryPlan]:
    return [MemoryPlan(f"ring[{rank}]", size * GIB, rank) for rank, size in enumerate(sizes_gib)]


def test_what_fits_on_each_node_may_be_too_much_for_the_limit_of_all() -> None:
    check_memory(rings(4, 4), two_nodes(), "bind", pytest.fail)
    with pytest.raises(NodeCapacityError, match=r"needs 8192 MiB, but the cgroup's memory limit has 6144 MiB left"):
        check_memory(rings(4, 4), two_nodes(6 * GIB), "bind", pytest.fail)


def test_a_node_that_is_short_is_an_error_or_a_word_as_the_policy_says() -> None:
    with pytest.raises(NodeCapacityError, match="but node 0 has"):
        check_memory(rings(9, 1), two_nodes(), "bind", pytest.fail)
    said: list[str] = []
    check_memory(rings(9, 1), two_nodes(), "preferred", said.append)
    assert len(said) == 1
    assert "node 0 has" in said[0]
    assert "memory of other nodes will be used" in said[0]
    with pytest.raises(NodeCapacityError, match="this process's NUMA nodes"):
        check_memory(rings(9, 9), two_nodes(), "preferred", pytest.fail)


def test_explain_shows_what_is_needed_where_and_what_is_there(tmp_path: Path) -> None:
    setup = toy_trainer(tmp_path / "run").setup
    text = explain(replace(setup, topology=two_nodes(6 * GIB)))
    assert "ring[1]:" in text
    assert "weights[1]:" in text
    assert "together: " in text
    assert "6,442.45 MB left under the cgroup's memory limit" in text
    assert "will refuse" not in text
    assert "no cgroup limit" in explain(replace(setup, topology=two_nodes()))
    short = explain(replace(setup, topology=two_nodes(1000)))
    assert "run() will refuse to start: the rings and weight snapshots of this run needs" in short
    assert "(ring_capacity, ring_max_bytes)" in short
