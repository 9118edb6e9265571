"""The snapshot itself: made once by the parent, handed to the learner and one collector, opened there."""

from __future__ import annotations

from types import TracebackType

from numa_collectors._futex import require_fence
from numa_collectors.shm import Region, RegionPolicy
from numa_collectors.snapshots.memory import SLOT_BITS, W_LATEST, SnapshotMemory, snapshot_bytes
from numa_collectors.snapshots.publisher import SnapshotPublisher
from numa_collectors.snapshots.reader import SnapshotReader
from numa_collectors.snapshots.spec import WeightSpec

__all__ = ["WeightSnapshot"]


class WeightSnapshot:
    """The newest whole version of a set of tensors, in shared memory near its reader.

    The object is a handle: pass it to a child while spawning it (by pickling), and open :meth:`publisher` or
    :meth:`reader`.
    """

    def __init__(self, region: Region, spec: WeightSpec, name: str) -> None:
        """Attach to the snapshot of ``spec`` in ``region``; SchemaMismatchError when the region holds something else.

        Use :meth:`create` to make one.
        """
        require_fence("a WeightSnapshot")
        self.name = name
        self.spec = spec
        self.region = region
        self._memory = SnapshotMemory(name, spec, region.buf)
        try:
            self._memory.check()
        except BaseException:
            self._memory.release()
            raise
        self._ends: list[SnapshotPublisher | SnapshotReader] = []
        self._open = True

    @classmethod
    def create(
        cls,
        spec: WeightSpec,
        *,
        node: int | None = None,
        policy: RegionPolicy = "bind",
        toucher_cpus: tuple[int, ...] | None = None,
        huge_pages: bool = False,
        name: str = "snapshot",
    ) -> WeightSnapshot:
        """Make a snapshot without a version whose pages lie on ``node`` (None: anywhere).

        ``policy``, ``toucher_cpus`` and ``huge_pages``: see :class:`numa_collectors.shm.Region`.  Raises
        NodeCapacityError when the memory is not there, NotImplementedError where no memory fence can be had.
        """
        require_fence("a WeightSnapshot")
        if not isinstance(spec, WeightSpec):
            raise ValueError(f"expected a WeightSpec, got {type(spec).__name__}")
        region = Region.create(
            name,
            snapshot_bytes(spec),
            node=node,
            policy=policy,
            toucher_cpus=toucher_cpus,
            huge_pages=huge_pages,
        )
        memory = SnapshotMemory(name, spec, region.buf)
        memory.format()
        memory.release()
        return cls(region, spec, name)

    @property
    def latest(self) -> int:
        """The newest whole version, -1 before the first."""
        return int(self._memory.words[W_LATEST]) >> SLOT_BITS

    def publisher(self) -> SnapshotPublisher:
        """Open the writing end in this process; NumaCollectorsError while another live publisher holds it."""
        end = SnapshotPublisher(self._memory)
        self._ends.append(end)
        return end

    def reader(self) -> SnapshotReader:
        """Open a reading end in this process."""
        end = SnapshotReader(self._memory)
        self._ends.append(end)
        return end

    def close(self) -> None:
        """Close the ends that were opened by this handle, and unmap.  May be called twice."""
        if self._open:
            self._open = False
            for end in self._ends:
                end.close()
            self._memory.release()
        self.region.close()

    def __enter__(self) -> WeightSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return (WeightSnapshot, (self.region, self.spec, self.name))
