"""Topologies of synthetic and archived machines, discovered once a process."""

from __future__ import annotations

import functools
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from numa_collectors.testing.machines.catalogue import MACHINES
from numa_collectors.topo.model import Topology

__all__ = ["archived_topology", "topology_of"]

# Unpacking is most of the time that an archive takes: what discovery never looks at stays in it.
_UNREAD = re.compile(
    r"/(index1/.*|numastat|vmstat|power/.*|cpuidle/.*|thermal_throttle/.*|die_.*|surplus_hugepages|allocation_policy|"
    r"size|type|ways_of_associativity|number_of_sets|physical_line_partition|coherency_line_size|config|core_id|"
    r"write_policy|acpi_cppc/.*|cluster_.*|id|scaling_.*|cpuinfo_.*|(max|current)_link_.*|affected_cpus|related_cpus|"
    r"energy_.*)$"
)
_TRUSTED: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}


@functools.cache
def topology_of(name: str) -> Topology:
    """Return what discovery finds on the machine of that name in ``MACHINES``."""
    with tempfile.TemporaryDirectory() as directory:
        return Topology.discover(MACHINES[name]().write(directory))


@functools.cache
def archived_topology(archive: Path) -> Topology:
    """Return what discovery finds in ``NAME.tar.xz``, whose ``NAME.json`` stands beside it.

    ``synthetic_proc_self_status`` of the JSON, where it is not null, becomes ``proc/self/status``.
    """
    name = archive.name.removesuffix(".tar.xz")
    facts = json.loads((archive.parent / f"{name}.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(archive) as tar:
            members = [item for item in tar if not _UNREAD.search(item.name) and not item.isdir()]
            tar.extractall(directory, members, **_TRUSTED)
        root = Path(directory) / name
        if facts["synthetic_proc_self_status"]:
            (root / "proc/self").mkdir(parents=True, exist_ok=True)
            (root / "proc/self/status").write_text(facts["synthetic_proc_self_status"])
        return Topology.discover(root)
