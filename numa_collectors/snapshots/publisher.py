"""The writing end of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from numa_collectors._futex import STORE_ORDER_STRONG, full_fence
from numa_collectors._identity import C_LIVE, Gone, guard_fork
from numa_collectors.errors import SchemaMismatchError
from numa_collectors.snapshots.memory import (
    NUM_SLOTS,
    SLOT_BITS,
    W_CLAIM,
    W_LATEST,
    SnapshotMemory,
    counter_word,
    slot_offset,
)
from numa_collectors.snapshots.spec import Array, TensorSpec, storage_dtype

__all__ = ["SnapshotPublisher"]


class SnapshotPublisher:
    """Writes versions, never waiting for anybody.  Obtained from :meth:`WeightSnapshot.publisher`.

    Belongs to one thread of one process.  After a predecessor's death it goes on at the last whole version: a version
    that was half written is never seen by a reader, and its slot is written next.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        memory.claim()
        self._memory = memory
        self._words: Any = memory.words
        self._open = True
        self._flat = [
            np.frombuffer(memory.data, np.uint8, memory.spec.nbytes, slot_offset(memory.spec, slot))
            for slot in range(NUM_SLOTS)
        ]
        self._views = [memory.spec.views(memory.data, slot_offset(memory.spec, slot)) for slot in range(NUM_SLOTS)]
        guard_fork(self)

    def _after_fork(self) -> None:
        self._words = Gone(
            f"this publisher of snapshot {self._memory.name!r} belongs to the parent process; start processes by spawn"
        )
        self._open = False

    @property
    def version(self) -> int:
        """The last whole version, -1 before the first."""
        return int(self._words[W_LATEST]) >> SLOT_BITS

    def publish(self, weights: Mapping[str, npt.ArrayLike] | npt.NDArray[Any] | memoryview, version: int) -> None:
        """Publish ``weights``: a flat image (see :class:`WeightSpec`) or a mapping of tensor name to array.

        ``version`` must be above :attr:`version` (ValueError).  Dtypes and shapes must be the spec's, bfloat16 and
        float8 tensors as unsigned integers of their size (SchemaMismatchError).  Nothing is written before everything
        is checked.
        """
        if not isinstance(weights, Mapping):
            self.publish_bytes(weights.data if isinstance(weights, np.ndarray) else weights, version)
            return
        spec = self._memory.spec
        if len(weights) != len(spec.tensors) or any(tensor.name not in weights for tensor in spec.tensors):
            missing, unknown = sorted(set(spec.names) - set(weights)), sorted(set(weights) - set(spec.names))
            raise SchemaMismatchError(
                f"snapshot {self._memory.name!r}: publish() needs exactly the tensors of the spec; missing {missing}, "
                f"unknown {unknown}"
            )
        arrays = [(tensor.name, self._convert(tensor, weights[tensor.name])) for tensor in spec.tensors]

        def copy(slot: int) -> None:
            views = self._views[slot]
            for name, array in arrays:
                views[name][...] = array

        self._write(copy, version)

    def publish_bytes(self, flat: memoryview, version: int) -> None:
        """Publish a flat image of exactly ``spec.nbytes`` bytes; see :class:`WeightSpec` for its form."""
        if flat.nbytes != self._memory.spec.nbytes or not flat.c_contiguous:
            raise SchemaMismatchError(
                f"snapshot {self._memory.name!r}: a flat image has {self._memory.spec.nbytes} contiguous bytes, got "
                f"{flat.nbytes}"
            )
        source = np.frombuffer(flat, np.uint8)

        def copy(slot: int) -> None:
            self._flat[slot][...] = source

        self._write(copy, version)

    def _convert(self, tensor: TensorSpec, value: npt.ArrayLike) -> Array:
        array = np.asarray(value)
        storage = storage_dtype(tensor.dtype)
        if array.dtype.name == tensor.dtype and array.dtype != storage:
            array = array.view(storage)
        if array.dtype != storage or array.shape != tensor.shape:
            raise SchemaMismatchError(
                f"snapshot {self._memory.name!r}, tensor {tensor.name!r}: expected {tensor.dtype}{list(tensor.shape)}"
                f"{'' if storage.name == tensor.dtype else f' as {storage.name}'}, got {array.dtype}{list(array.shape)}"
            )
        return array

    def _write(self, copy: Callable[[int], None], version: int) -> None:
        """Write one version into the slot after that of the latest one.

        The slot's counter is odd (2v+1) while it is written and 2v+2 when v is whole, and LATEST names v and its slot
        only then.  A writer that dies in between leaves LATEST at the version before.
        """
        words = self._words
        latest = words[W_LATEST]
        if version <= latest >> SLOT_BITS or version < 0:
            raise ValueError(
                f"snapshot {self._memory.name!r}: versions must rise; got {version} after {latest >> SLOT_BITS}"
            )
        slot = ((latest & (1 << SLOT_BITS) - 1) + 1) % NUM_SLOTS
        counter = counter_word(slot)
        words[counter] = 2 * version + 1
        if not STORE_ORDER_STRONG:
            full_fence()
        copy(slot)
        if not STORE_ORDER_STRONG:
            full_fence()
        words[counter] = 2 * version + 2
        words[W_LATEST] = version << SLOT_BITS | slot

    def close(self) -> None:
        """Give the writing end up to a successor.  Readers keep the last version.  May be called twice."""
        if not self._open:
            return
        self._open = False
        self._words[W_CLAIM + C_LIVE] = 0
        self._words = Gone(f"this publisher of snapshot {self._memory.name!r} is closed")
        self._flat = []
        self._views = []

    def __enter__(self) -> SnapshotPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
