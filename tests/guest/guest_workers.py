"""What spawned children of guest tests run; apart from the tests, since a child imports the module of its target."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from guest_support import page_nodes, private_pages

from numa_collectors.worker import PinnedWorker

if TYPE_CHECKING:
    from numa_collectors.rings import TransitionRing
    from numa_collectors.shm import Region
    from numa_collectors.snapshots import WeightSnapshot

__all__ = ["Reporting", "collect", "nodes_of"]

DEADLINE_S = 240.0


def nodes_of(region: Region) -> list[int]:
    """The nodes that a region's pages are on, as this process sees them."""
    num_pages = region.size_bytes // 4096
    return sorted(set(page_nodes(region.address, num_pages)))


def collect(ring: TransitionRing, snapshot: WeightSnapshot, num_slots: int, pipe: Connection) -> None:
    """Write ``num_slots`` slots that each tell which they are, under the newest weights; then say what was seen."""
    weights_seen = []
    with ring.producer() as producer, snapshot.reader() as reader:
        for step in range(num_slots):
            version = reader.poll()
            if version is not None:
                weights_seen.append(
                    [version, float(reader.weights["weight"].min()), float(reader.weights["weight"].max())]
                )
            slot = producer.reserve(DEADLINE_S)
            assert slot is not None, "the consumer fell asleep"
            slot["obs"][:] = step
            slot["reward"][:] = -step
            producer.commit(version=reader.version, step=step)
        where = (nodes_of(ring.region), nodes_of(snapshot.region), private_pages(), sorted(os.sched_getaffinity(0)))
    pipe.send((weights_seen, where))
    pipe.close()
    ring.close()
    snapshot.close()


class Reporting(PinnedWorker):
    """Says where its own pages and those of multiprocessing's resource tracker may be, when its code begins."""

    def setup(self) -> None:
        from multiprocessing import resource_tracker

        tracker_pid = resource_tracker._resource_tracker._pid or _tracker_of(os.getppid())
        self.set_result(
            {
                "pages": private_pages(),
                "cpus": sorted(os.sched_getaffinity(0)),
                "threads": os.environ.get("OMP_NUM_THREADS"),
                "tracker_cpus": sorted(os.sched_getaffinity(tracker_pid)),
            }
        )

    def step(self) -> bool:
        return True


def _tracker_of(parent_pid: int) -> int:
    """The pid of the parent's resource tracker: the child of it that runs that module."""
    for task in os.listdir(f"/proc/{parent_pid}/task"):
        with open(f"/proc/{parent_pid}/task/{task}/children") as file:
            for pid in file.read().split():
                with open(f"/proc/{pid}/cmdline", "rb") as command:
                    if b"resource_tracker" in command.read():
                        return int(pid)
    raise RuntimeError("the parent has no resource tracker")
