"""Shared memory whose pages lie where they were planned, with proof.

Guarantees
    * A region exists only after its pages do: create, bind (or pinned first touch), prefault, verify.  Nobody can touch
      or allocate a page before the bind, and no page fault, no shortage and no OOM kill is left for the training loop.
    * A region has no name: nothing can leak into ``/dev/shm``, and a container's 64 MB there is no limit.  It lives as
      long as somebody maps it or holds its descriptor.
    * ``report.verified`` is True only if every page that was looked at was seen on the planned node.
Assumes
    * ``mbind`` on a shared mapping sets the policy of the file, for every mapper and for reopeners, but only for pages
      that do not exist yet (mm/shmem.c: shmem_get_policy; ``posix_fallocate`` before it would defeat it).
    * Page status queries are per process: a page that another process touched is unknown until this one maps it.
Not covered
    * Migration by an administrator or by a cpuset that shrinks: :meth:`Region.verify` sees it afterwards.
"""

from __future__ import annotations

from numa_collectors.shm._placing import RegionPolicy, RegionReport
from numa_collectors.shm._region import Region

__all__ = ["Region", "RegionPolicy", "RegionReport"]
