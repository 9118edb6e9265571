"""The region itself: one descriptor, one mapping, one report."""

from __future__ import annotations

import io
import mmap
import os
from multiprocessing import context, reduction
from types import TracebackType
from typing import Protocol

from numa_collectors.errors import NodeCapacityError
from numa_collectors.shm._placing import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    Plan,
    RegionPolicy,
    RegionReport,
    address_of,
    check,
    open_anonymous,
    place,
    populate,
    report,
    seal_size,
)

__all__ = ["Region"]


class _PassedDescriptor(Protocol):
    def detach(self) -> int: ...


class Region:
    """Zero-filled shared memory on a planned node; see the package for what is guaranteed.

    Made by :meth:`create` (or by unpickling in a child that is being spawned, or by :meth:`attach` from a descriptor).
    """

    def __init__(self, name: str, size_bytes: int, file: io.FileIO, plan: Plan, *, huge_pages: bool = False) -> None:
        self._file = file
        self._name = name
        self._size_bytes = size_bytes
        self._plan = plan
        self._huge_pages = huge_pages
        self._report: RegionReport | None = None
        self._mapping = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size)
        self._address = address_of(self._mapping)
        self._buf = memoryview(self._mapping)[:size_bytes]

    @classmethod
    def create(
        cls,
        name: str,
        size_bytes: int,
        *,
        node: int | None = None,
        policy: RegionPolicy = "bind",
        toucher_cpus: tuple[int, ...] | None = None,
        huge_pages: bool = False,
    ) -> Region:
        """Allocate ``size_bytes`` of zeros on ``node`` and say where they are (:attr:`report`).

        ``node=None`` and ``policy="none"`` leave the placing to the first touch, which happens here: by the calling
        thread, or by a throwaway thread on ``toucher_cpus``.  Where the kernel refuses ``mbind`` the pages are first
        touched from ``toucher_cpus`` (default: the CPUs of ``node`` in the calling thread's mask).  ``"preferred"``
        spills to other nodes when ``node`` is full, and the report says so; ``"bind"`` never does.

        Raises ``BindingError`` for a node that cannot be used, ``NodeCapacityError`` (a ``MemoryError``) for a
        shortage; nothing is allocated then.
        """
        if size_bytes <= 0:
            raise ValueError(f"expected a positive size in bytes, got {size_bytes} for region {name!r}")
        if policy not in ("bind", "preferred", "none"):
            raise ValueError(f"expected the policy 'bind', 'preferred' or 'none', got {policy!r}")
        unit = HUGE_PAGE_BYTES if huge_pages else PAGE_BYTES
        mapped_bytes = -(-size_bytes // unit) * unit
        plan = Plan(node, policy, toucher_cpus)
        check(name, mapped_bytes, plan)
        # FileIO owns the descriptor, and warns if it is dropped without close().
        file = io.FileIO(open_anonymous(name), "r+b")
        try:
            file.truncate(mapped_bytes)
            seal_size(file.fileno())
            region = cls(name, size_bytes, file, plan, huge_pages=huge_pages)
        except OSError as error:
            file.close()
            raise NodeCapacityError(f"region {name!r} of {mapped_bytes} bytes could not be made: {error}") from error
        try:
            place(region._mapping, plan, huge_pages=huge_pages)
            region.verify()
        except BaseException:
            region.close()
            raise
        return region

    @classmethod
    def attach(
        cls, descriptor: int, *, name: str = "region", size_bytes: int | None = None, node: int | None = None
    ) -> Region:
        """Map the region of ``descriptor``, which now belongs to the new object.

        Fills this process's page tables, so that no page fault is left and :meth:`verify` has answers; allocates and
        writes nothing.  ``node`` is the planned node for :meth:`verify`.
        """
        file = io.FileIO(descriptor, "r+b")
        try:
            size = os.fstat(descriptor).st_size
            if not 0 < (size_bytes or size) <= size:
                raise ValueError(f"expected a region of at least {size_bytes} bytes, got a file of {size} bytes")
            region = cls(name, size_bytes or size, file, Plan(node, "bind", None, method="attached"))
            populate(region._mapping, create=False)
        except BaseException:
            file.close()
            raise
        return region

    @property
    def name(self) -> str:
        """What the region is for; the kernel shows it in ``/proc/PID/maps``."""
        return self._name

    @property
    def size_bytes(self) -> int:
        """The size asked for; the mapping is rounded up to whole pages."""
        return self._size_bytes

    @property
    def buf(self) -> memoryview:
        """The bytes, writable, ``size_bytes`` long."""
        self._check_open()
        return self._buf

    @property
    def address(self) -> int:
        """Where the region begins in this process; page aligned."""
        self._check_open()
        return self._address

    @property
    def report(self) -> RegionReport:
        """The last report: of :meth:`create`, or of the last :meth:`verify` in this process."""
        return self._report if self._report is not None else self.verify()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has succeeded."""
        return self._file.closed

    def fileno(self) -> int:
        """Return the descriptor, to pass it on; it stays the region's own."""
        self._check_open()
        return self._file.fileno()

    def verify(self) -> RegionReport:
        """Look again where the pages are, from this process, and return the report."""
        self._check_open()
        self._report = report(self._mapping, self._plan, huge_pages=self._huge_pages)
        return self._report

    def close(self) -> None:
        """Unmap and close; again is a no-op.  Other processes keep the memory until they close too.

        Raises ``BufferError`` while views of :attr:`buf` are still held (numpy arrays too); nothing is closed then, and
        a later call succeeds.
        """
        if self._file.closed:
            return
        try:
            self._buf.release()
            self._mapping.close()
        except BufferError:
            self._buf = memoryview(self._mapping)[: self._size_bytes]
            raise BufferError(
                f"region {self._name!r} is still in use: drop every view of it (arrays, slices of .buf) before close()"
            ) from None
        self._file.close()

    def close_when_unused(self) -> None:
        """Close now what can be closed; the memory stays mapped until the last view of it is gone.

        For the end of a run in which somebody still holds arrays of a ring: they stay readable.
        """
        try:
            self.close()
        except BufferError:
            # The mapping is kept alive by those views and unmapped by the interpreter with the last of them.
            del self._buf, self._mapping
            self._file.close()

    def _check_open(self) -> None:
        if self._file.closed:
            raise ValueError(f"region {self._name!r} is closed; use it before close()")

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"node={self._plan.node}"
        return f"Region({self._name!r}, {self._size_bytes} bytes, {state})"

    def __reduce__(self) -> tuple[object, ...]:
        # A descriptor means something only to a child that is being given it: elsewhere this raises RuntimeError.
        context.assert_spawning(self)
        self._check_open()
        passed = reduction.DupFd(self._file.fileno())
        return (_attach_passed, (passed, self._name, self._size_bytes, self._plan.node, self._report))


def _attach_passed(
    passed: _PassedDescriptor, name: str, size_bytes: int, node: int | None, known: RegionReport | None
) -> Region:
    region = Region.attach(passed.detach(), name=name, size_bytes=size_bytes, node=node)
    region._report = known
    return region
