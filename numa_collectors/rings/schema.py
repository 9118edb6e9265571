"""What a slot holds: named fields with dtype and shape."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["CACHE_LINE_BYTES", "META_BYTES", "Field", "Schema"]

CACHE_LINE_BYTES = 64
META_BYTES = 64
"""Bytes of a slot's metadata record: version, step, generation, timestamp and spare words, one cache line."""

_ALLOWED_KINDS = "biufc"


def padded(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole cache lines."""
    return -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES


@dataclass(frozen=True)
class Field:
    """One field of a slot: ``shape`` elements of ``dtype`` (a numpy bool, integer, float or complex dtype)."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a field's name must be a non-empty string, got {self.name!r}")
        try:
            dtype = np.dtype(self.dtype)
        except TypeError as error:
            raise ValueError(f"field {self.name!r}: {self.dtype!r} is not a numpy dtype") from error
        if dtype.kind not in _ALLOWED_KINDS or not dtype.isnative:
            raise ValueError(
                f"field {self.name!r}: dtype {self.dtype!r} cannot be shared between processes; use a bool, integer, "
                "float or complex dtype in native byte order (bfloat16 travels as uint16)"
            )
        shape = tuple(int(length) for length in self.shape)
        if any(length < 1 for length in shape):
            raise ValueError(f"field {self.name!r}: shape {shape} holds no bytes; every dimension must be at least 1")
        object.__setattr__(self, "dtype", dtype.name)
        object.__setattr__(self, "shape", shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot's worth of this field."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Schema:
    """The fields of a slot, in order.  Picklable, hashable; both sides of a ring must hold an equal one."""

    fields: tuple[Field, ...]

    def __init__(self, fields: Iterable[Field]) -> None:
        object.__setattr__(self, "fields", tuple(fields))
        if not self.fields:
            raise ValueError("a schema needs at least one field")
        for field in self.fields:
            if not isinstance(field, Field):
                raise ValueError(f"a schema holds Field objects, got {field!r}")
        if len(set(self.names)) != len(self.fields):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise ValueError(f"field names must differ; given more than once: {', '.join(twice)}")

    @property
    def names(self) -> tuple[str, ...]:
        """Field names in order."""
        return tuple(field.name for field in self.fields)

    def with_leading(self, length: int) -> Schema:
        """The same fields with a leading dimension (per environment -> per shard of ``length`` environments)."""
        if length < 1:
            raise ValueError(f"the leading dimension must be at least 1, got {length}")
        return Schema(Field(field.name, field.dtype, (length, *field.shape)) for field in self.fields)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes that one slot takes in a ring, padding to cache lines and metadata included."""
        return META_BYTES + sum(padded(field.nbytes) for field in self.fields)

    @cached_property
    def fingerprint(self) -> int:
        """63-bit digest of names, dtypes, shapes and order; compared when a process attaches."""
        text = ";".join(f"{field.name}:{field.dtype}:{field.shape}" for field in self.fields)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
