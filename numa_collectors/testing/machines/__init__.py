"""Machines that nobody has at hand: synthetic sysfs and procfs roots for tests of placement.

``MACHINES[name]()`` gives a :class:`Machine`; ``machine.write(directory)`` writes the root that
``Topology.discover(root=directory)`` reads.  :class:`Builder` makes further ones.
``topology_of(name)`` gives what discovery finds there, without a disk.
"""

from __future__ import annotations

from numa_collectors.testing.machines.builder import Builder, Machine
from numa_collectors.testing.machines.catalogue import MACHINES
from numa_collectors.testing.machines.topologies import archived_topology, discover_machine, read_archive, topology_of

__all__ = ["MACHINES", "Builder", "Machine", "archived_topology", "discover_machine", "read_archive", "topology_of"]
