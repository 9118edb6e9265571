"""Tests here run inside a lab guest; each names its topologies: ``@pytest.mark.guest("2n", "smt")``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TOPOLOGY = os.environ.get("NUMA_COLLECTORS_LAB_TOPOLOGY", "")
SHARD, NUM_SHARDS = (int(text) for text in os.environ.get("NUMA_COLLECTORS_LAB_SHARD", "0/1").split("/"))
HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))
from guest_support import MACHINES  # noqa: E402 - found by the line above

_ELSEWHERE = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other topologies and shards; on a machine that is no guest that is all of them."""
    here: list[pytest.Item] = []
    elsewhere: list[pytest.Item] = []
    num_own = 0
    for item in items:
        if HERE not in item.path.parents:
            here.append(item)
            continue
        mark = item.get_closest_marker("guest")
        if mark is None or not mark.args or not set(mark.args) <= set(MACHINES):
            known = ", ".join(MACHINES)
            raise pytest.UsageError(
                f"{item.nodeid} must name its topologies by @pytest.mark.guest(...), out of {known}"
            )
        num_own += TOPOLOGY in mark.args
        (here if TOPOLOGY in mark.args and num_own % NUM_SHARDS == SHARD else elsewhere).append(item)
    if elsewhere:
        config.stash[_ELSEWHERE] = len(elsewhere)
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = here


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say why tests were left out."""
    number = config.stash.get(_ELSEWHERE, 0)
    if number and not TOPOLOGY:
        terminalreporter.write_line(f"{number} tests of tests/guest run inside lab guests only (python tests/lab all)")


@pytest.fixture(scope="session")
def topology_name() -> str:
    """The name of the guest's topology."""
    return TOPOLOGY
