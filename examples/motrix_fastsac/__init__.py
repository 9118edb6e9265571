"""motrix FastSAC on numa_collectors: their agent, replay buffer, networks and environments, our processes.

``mxlab train task=<env>/numa.fastsac`` runs it; see docs/motrix.md.  Installed, the package is called ``motrix_fastsac``.
"""
