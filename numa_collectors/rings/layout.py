"""Where everything lies in a ring's memory: a header of words, then metadata records, then one array per field.

Every word that is written while the ring runs has a line pair of 128 bytes to itself (x86-64 prefetches line pairs,
some aarch64 have 128-byte lines) and one writer, with two exceptions that are both idempotent: an ``ASLEEP`` word is
set by the sleeper and cleared by whoever wakes it, and the bytes of ``STATE`` have one writer each.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from numa_collectors.errors import SchemaMismatchError
from numa_collectors.rings.schema import META_BYTES, Schema, padded

Array = npt.NDArray[Any]

MAGIC = 0x31_67_6E_69_52_43_4E  # "NCRing1"

_LINE_WORDS = 16

# Indices of 8-byte words.
W_MAGIC = 0
W_FINGERPRINT = 1
W_CAPACITY = 2
W_LIMIT = 3
W_COMMITTED = 1 * _LINE_WORDS
W_RELEASED = 2 * _LINE_WORDS
W_CONSUMER_ASLEEP = 3 * _LINE_WORDS
W_PRODUCER_ASLEEP = 4 * _LINE_WORDS
W_STATE = 5 * _LINE_WORDS
W_PRODUCER_CLAIM = 6 * _LINE_WORDS
W_CONSUMER_CLAIM = 7 * _LINE_WORDS
HEADER_BYTES = 4096

# Bytes of the STATE word, one writer each (byte stores of different writers do not disturb each other), read as one
# word.
B_PRODUCER_CLOSED = 8 * W_STATE + 0
B_CONSUMER_CLOSED = 8 * W_STATE + 1
B_RING_CLOSED = 8 * W_STATE + 2
B_PRODUCER_LOST = 8 * W_STATE + 3
B_CONSUMER_LOST = 8 * W_STATE + 4


def _state_bit(byte: int) -> int:
    index = byte - 8 * W_STATE
    return 1 << 8 * (index if sys.byteorder == "little" else 7 - index)


PRODUCER_CLOSED = _state_bit(B_PRODUCER_CLOSED)
CONSUMER_CLOSED = _state_bit(B_CONSUMER_CLOSED)
RING_CLOSED = _state_bit(B_RING_CLOSED)
PRODUCER_LOST = _state_bit(B_PRODUCER_LOST)
CONSUMER_LOST = _state_bit(B_CONSUMER_LOST)
STOPS_PRODUCER = CONSUMER_CLOSED | RING_CLOSED | CONSUMER_LOST
STOPS_CONSUMER = PRODUCER_CLOSED | RING_CLOSED | PRODUCER_LOST

META_WORDS = META_BYTES // 8
M_VERSION, M_STEP, M_GENERATION, M_TIMESTAMP = range(4)

DEFAULT_MAX_BYTES = 16 << 20
"""Default bound of a ring's data: what stays in a server's last-level cache keeps the speed of memory copies."""
DEFAULT_MAX_SLOTS = 256


def choose_capacity(schema: Schema, capacity: int | None, max_bytes: int | None) -> int:
    """Slots of a ring: the smaller of ``capacity`` and what ``max_bytes`` hold; by default 16 MiB, 2 to 256 slots."""
    for name, value in (("capacity", capacity), ("max_bytes", max_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if max_bytes is None:
        if capacity is not None:
            return capacity
        return min(max(DEFAULT_MAX_BYTES // schema.slot_bytes, 2), DEFAULT_MAX_SLOTS)
    fitting = max_bytes // schema.slot_bytes
    if fitting < 1:
        raise ValueError(f"max_bytes={max_bytes} holds no slot: one takes {schema.slot_bytes} bytes; raise max_bytes")
    return min(fitting, DEFAULT_MAX_SLOTS if capacity is None else capacity)


def ring_bytes(schema: Schema, capacity: int) -> int:
    """Bytes of the whole ring."""
    return HEADER_BYTES + capacity * schema.slot_bytes


def build_arrays(schema: Schema, capacity: int, data: memoryview) -> dict[str, Array]:
    """One array ``(capacity, *shape)`` per field over ``data``, every slot beginning on a cache line of its own."""
    # np.ndarray(buffer=memoryview) exports nothing, so that the memory could be unmapped under it; np.frombuffer does.
    flat = np.frombuffer(data, np.uint8)
    arrays: dict[str, Array] = {}
    offset = HEADER_BYTES + capacity * META_BYTES
    for field in schema.fields:
        dtype = np.dtype(field.dtype)
        strides = [dtype.itemsize] * len(field.shape)
        for axis in range(len(field.shape) - 2, -1, -1):
            strides[axis] = strides[axis + 1] * field.shape[axis + 1]
        stride = padded(field.nbytes)
        arrays[field.name] = np.ndarray(
            (capacity, *field.shape), dtype, buffer=flat, offset=offset, strides=(stride, *strides)
        )
        offset += capacity * stride
    return arrays


def build_metadata(capacity: int, data: memoryview) -> npt.NDArray[np.int64]:
    """The metadata records as ``(capacity, META_WORDS)`` int64."""
    metadata: npt.NDArray[np.int64] = np.ndarray(
        (capacity, META_WORDS), np.dtype(np.int64), buffer=np.frombuffer(data, np.uint8), offset=HEADER_BYTES
    )
    return metadata


def format_header(words: memoryview, schema: Schema, capacity: int, limit: int) -> None:
    """Write the constants of a fresh ring; the magic word last."""
    words[W_FINGERPRINT] = schema.fingerprint
    words[W_CAPACITY] = capacity
    words[W_LIMIT] = limit
    words[W_MAGIC] = MAGIC


def check_header(words: memoryview, schema: Schema, size_bytes: int, name: str) -> tuple[int, int]:
    """Capacity and limit of the ring that another process made; raises unless it is a ring of ``schema``."""
    if words[W_MAGIC] != MAGIC:
        raise SchemaMismatchError(f"ring {name!r}: the region holds no ring of this version of the library")
    if words[W_FINGERPRINT] != schema.fingerprint:
        fields = ", ".join(f"{field.name}:{field.dtype}{list(field.shape)}" for field in schema.fields)
        raise SchemaMismatchError(
            f"ring {name!r} was created with another schema than this side's ({fields}); "
            "give both sides the same names, dtypes, shapes and order"
        )
    capacity, limit = int(words[W_CAPACITY]), int(words[W_LIMIT])
    if size_bytes < ring_bytes(schema, capacity):
        raise SchemaMismatchError(
            f"ring {name!r}: {capacity} slots need {ring_bytes(schema, capacity)} bytes, the region has {size_bytes}"
        )
    return capacity, limit
