"""Where everything lies in a snapshot's memory, and who may write it."""

from __future__ import annotations

from dataclasses import dataclass, field

from numa_collectors._identity import claim_holder, write_claim
from numa_collectors.errors import NumaCollectorsError, SchemaMismatchError
from numa_collectors.snapshots.spec import WeightSpec

MAGIC = 0x31_70_61_6E_53_43_4E  # "NCSnap1"

_LINE_WORDS = 16
W_MAGIC = 0
W_FINGERPRINT = 1
W_NBYTES = 2
W_LATEST = 1 * _LINE_WORDS
W_CLAIM = 2 * _LINE_WORDS
W_COUNTERS = 4 * _LINE_WORDS

NUM_SLOTS = 3
SLOT_BITS = 2
"""Slots of a snapshot, and the bits that hold a slot's index in the LATEST word."""

_HEADER_BYTES = 4096
_PAGE_BYTES = 4096


def counter_word(slot: int) -> int:
    """Index of the word that counts the writes of ``slot``."""
    return W_COUNTERS + slot * _LINE_WORDS


def slot_offset(spec: WeightSpec, slot: int) -> int:
    """Byte offset of the flat image of ``slot``."""
    return _HEADER_BYTES + slot * (-(-spec.nbytes // _PAGE_BYTES) * _PAGE_BYTES)


def snapshot_bytes(spec: WeightSpec) -> int:
    """Bytes of the whole snapshot."""
    return slot_offset(spec, NUM_SLOTS)


@dataclass
class SnapshotMemory:
    """A mapped snapshot: ``data`` is its writable memory."""

    name: str
    spec: WeightSpec
    data: memoryview
    words: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.data[: len(self.data) // 8 * 8].cast("q")

    def format(self) -> None:
        """Write the constants of a fresh snapshot; the magic word last.  No version is there yet."""
        words = self.words
        words[W_FINGERPRINT] = self.spec.fingerprint
        words[W_NBYTES] = self.spec.nbytes
        words[W_LATEST] = -1 << SLOT_BITS
        words[W_MAGIC] = MAGIC

    def check(self) -> None:
        """Raise SchemaMismatchError unless this is a snapshot of ``spec``."""
        words = self.words
        if words[W_MAGIC] != MAGIC:
            raise SchemaMismatchError(
                f"snapshot {self.name!r}: the region holds no snapshot of this version of the library"
            )
        if words[W_FINGERPRINT] != self.spec.fingerprint or len(self.data) < snapshot_bytes(self.spec):
            raise SchemaMismatchError(
                f"snapshot {self.name!r} was created with other tensors than this side's ({len(self.spec.tensors)} of "
                f"them, {self.spec.nbytes} bytes; there {words[W_NBYTES]} bytes); give both sides the same names, "
                "dtypes, shapes and order"
            )

    def claim(self) -> None:
        """Become the only publisher; NumaCollectorsError while another one lives."""
        pid = claim_holder(self.words, W_CLAIM)
        if pid is not None:
            raise NumaCollectorsError(
                f"snapshot {self.name!r} has a live publisher already (pid {pid}); it has one at a time, close that "
                "one or wait for its death"
            )
        write_claim(self.words, W_CLAIM)

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self.words.release()
