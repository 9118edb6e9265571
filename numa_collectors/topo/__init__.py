"""Reading a machine's NUMA topology: nodes, CPUs, caches, devices, and what the process may use of them.

``Topology.discover()`` reads the machine; ``python -m numa_collectors.topo`` shows it.  Standard library only.
"""

from __future__ import annotations

from numa_collectors.topo.model import (
    Core,
    CpuGroup,
    Device,
    Distances,
    HugePages,
    Node,
    Package,
    Topology,
)

__all__ = ["Core", "CpuGroup", "Device", "Distances", "HugePages", "Node", "Package", "Topology"]
