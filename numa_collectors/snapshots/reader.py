"""The reading end of a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np

from numa_collectors._futex import STORE_ORDER_STRONG, full_fence
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.snapshots.memory import (
    NUM_SLOTS,
    SLOT_BITS,
    W_LATEST,
    SnapshotMemory,
    counter_word,
    slot_offset,
)
from numa_collectors.snapshots.spec import TENSOR_ALIGNMENT_BYTES, Array, WeightSpec

__all__ = ["SnapshotReader"]

MAX_RETRIES = 4
_SLOT_MASK = (1 << SLOT_BITS) - 1


def _private_buffer(spec: WeightSpec) -> Array:
    """A flat image of the process's own, aligned and with all its pages present."""
    raw = np.zeros(spec.nbytes + TENSOR_ALIGNMENT_BYTES, np.uint8)
    raw[:] = 0
    start = -raw.ctypes.data % TENSOR_ALIGNMENT_BYTES
    return raw[start : start + spec.nbytes]


class SnapshotReader:
    """Loads versions into private memory, never disturbing the publisher.  From :meth:`WeightSnapshot.reader`.

    Any number of readers may exist, each used by one thread.
    """

    def __init__(self, memory: SnapshotMemory) -> None:
        self._memory = memory
        self._words = memory.words
        self._open = True
        readonly = memory.data.toreadonly()
        self._slots = [
            np.frombuffer(readonly, np.uint8, memory.spec.nbytes, slot_offset(memory.spec, slot))
            for slot in range(NUM_SLOTS)
        ]
        buffers = [_private_buffer(memory.spec) for _ in range(2)]
        loaded, spare = [(buffer, memory.spec.views(buffer)) for buffer in buffers]
        # What was LATEST, its weights, and the spare memory.  One attribute: an exception between any two instructions, as of
        # Ctrl-C, finds all of them before a load or all of them after it.
        self._state = (-1 << SLOT_BITS, loaded, spare)
        self.num_retries = 0
        """Copies that were thrown away because the publisher had come round to the slot, since construction."""

    @property
    def latest(self) -> int:
        """The newest whole version that the publisher has announced, -1 before the first; one load from memory."""
        return int(self._words[W_LATEST]) >> SLOT_BITS

    @property
    def version(self) -> int:
        """The version in :attr:`weights`, -1 before the first."""
        return self._state[0] >> SLOT_BITS

    @property
    def weights(self) -> Mapping[str, Array]:
        """Tensor name -> array of the loaded version, in this process's own memory.

        Arrays stay as they are until the second load after theirs.  bfloat16 and float8 tensors are unsigned integers
        of the same size; the spec has their dtype.
        """
        if self.version < 0:
            raise NumaCollectorsError(f"snapshot {self._memory.name!r}: no version is loaded yet; poll() first")
        return self._state[1][1]

    def poll(self) -> int | None:
        """Load the newest version if it is not loaded yet; returns it, or None when there is nothing new.

        Copies into spare memory and swaps only when the copy is whole.  A publisher without pause can come round to
        the slot during the copy: after a few retries this gives up until the next call, keeping the old weights.
        """
        words = self._words
        latest = words[W_LATEST]
        seen, loaded, spare = self._state
        if latest == seen:
            return None
        for _ in range(MAX_RETRIES):
            slot = latest & _SLOT_MASK
            version = latest >> SLOT_BITS
            counter = counter_word(slot)
            if words[counter] == 2 * version + 2 and self._copy(slot, spare[0], counter, 2 * version + 2):
                self._state = (int(latest), spare, loaded)
                return int(version)
            self.num_retries += 1
            latest = words[W_LATEST]
        return None

    def _copy(self, slot: int, target: Array, counter: int, expected: int) -> bool:
        """Copy a slot; True when nobody began to write it meanwhile."""
        if not STORE_ORDER_STRONG:
            # The data must be read after the counter that covers them, and the counter read again after the data.
            full_fence()
        target[...] = self._slots[slot]
        if not STORE_ORDER_STRONG:
            full_fence()
        return bool(self._words[counter] == expected)

    def close(self) -> None:
        """Let go of the shared memory; :attr:`weights` stay.  May be called twice."""
        if self._open:
            self._open = False
            self._slots = []

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
