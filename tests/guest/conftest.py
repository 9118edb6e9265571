"""Tests here run inside a lab guest; each names its topologies: ``@pytest.mark.guest("2n", "smt")``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

TOPOLOGY = os.environ.get("NUMA_COLLECTORS_LAB_TOPOLOGY", "")

sys.path.insert(0, str(Path(__file__).parent))  # for guest_support


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip on a machine that is no guest; in a guest drop the tests of other topologies."""
    here = Path(__file__).parent
    elsewhere: list[pytest.Item] = []
    for item in items:
        if here not in item.path.parents:
            continue
        mark = item.get_closest_marker("guest")
        if mark is None or not mark.args:
            raise pytest.UsageError(f"{item.nodeid} must name its topologies: @pytest.mark.guest('2n', ...)")
        if not TOPOLOGY:
            name = mark.args[0]
            reason = f"needs a lab guest with topology {name}, and this machine is none (python tests/lab run {name})"
            item.add_marker(pytest.mark.skip(reason=reason))
        elif TOPOLOGY not in mark.args:
            elsewhere.append(item)
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture(scope="session")
def topology_name() -> str:
    """The name of the guest's topology."""
    return TOPOLOGY
