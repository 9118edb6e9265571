"""Deciding who runs where: pure functions from a topology and a request to a placement.

``plan`` starts nothing, reads nothing and always answers the same for the same input.  ``Placement.explain()`` says
why.
"""

from __future__ import annotations

from numa_collectors.placement.model import Placement, PlacementRequest, WorkerPlacement, unbound
from numa_collectors.placement.planning import plan
from numa_collectors.placement.sharing import local_share

__all__ = ["Placement", "PlacementRequest", "WorkerPlacement", "local_share", "plan", "unbound"]
