"""Weight snapshots in shared memory: one publisher, readers that always get the newest whole version.

Guarantees
    * A load is a whole version, bit-exact; the versions that a reader loads never fall.
    * The publisher never waits, whatever readers do; a reader never disturbs it.
    * A publisher that is killed at any point stops nobody: readers keep the last whole version, a successor goes on
      after it.

Assumes
    * Three slots written in turn, a counter for each, and a LATEST word that names a version and its slot.  The counter
      is 2v+1 while v is written and 2v+2 when it is whole.  A reader accepts a copy of v when the counter is 2v+2
      before and after: to harm it the publisher must have begun the third next version, and that turns the counter
      first.  The protocol is right with two slots already (the model has two); the third gives a reader the time of
      two whole publishes for its copy, without which a publisher without pause starves it.
    * Counters and LATEST are aligned 8-byte words, stored and loaded at once (see :mod:`numa_collectors.rings`).
    * x86-64: stores are seen in program order (a copy's non-temporal stores are fenced by the C library at its end)
      and loads are not reordered with loads.  Elsewhere full fences stand between counter and data on both sides.

Not covered
    * Two publishers that open a snapshot in the same instant; a supervisor starts a successor after the predecessor's
      death.
    * Progress of a reader whose copy takes longer than two whole publishes, against a publisher without pause: it keeps
      the old weights.
"""

from __future__ import annotations

from numa_collectors.snapshots.publisher import SnapshotPublisher
from numa_collectors.snapshots.reader import SnapshotReader
from numa_collectors.snapshots.snapshot import WeightSnapshot
from numa_collectors.snapshots.spec import TensorSpec, WeightSpec

__all__ = ["SnapshotPublisher", "SnapshotReader", "TensorSpec", "WeightSnapshot", "WeightSpec"]
