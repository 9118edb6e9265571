"""What a compact ring keeps in memory: the stored fields, and the side area behind them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from numa_collectors.errors import ConfigError
from numa_collectors.rings.layout import Array, ring_bytes
from numa_collectors.rings.schema import Field, Schema, padded

__all__ = ["BEGINS", "EXTENT", "CompactLayout", "observation_pairs"]

BEGINS = "compact/begins"
"""Stored field, bool ``(rows,)``: the row's observation is in the side area, not in the slot before."""
EXTENT = "compact/extent"
"""Stored field, int64 ``(2,)``: serial number of the slot's first side row, and how many are its own."""

_NEXT = "next_"


def observation_pairs(schema: Schema) -> Mapping[str, str]:
    """The fields that need not be stored, each with the field of its next value: every ``x`` beside an equal ``next_x``.

    ConfigError where there is none, or one of them differs in dtype or shape.
    """
    fields = {field.name: field for field in schema.fields}
    pairs = {name: _NEXT + name for name in fields if _NEXT + name in fields}
    for name, following in pairs.items():
        if (fields[name].dtype, fields[name].shape) != (fields[following].dtype, fields[following].shape):
            raise ConfigError(
                f"a compact ring needs fields {name!r} and {following!r} of one dtype and shape, got "
                f"{fields[name].dtype}{list(fields[name].shape)} and {fields[following].dtype}"
                f"{list(fields[following].shape)}; make them equal, or use the plain layout"
            )
    if not pairs:
        raise ConfigError(
            f"a compact ring needs a field x beside next_x (obs and next_obs), got {list(fields)}; name them so, or use "
            "the plain layout"
        )
    return pairs


class CompactLayout:
    """How slots of ``schema``, whose paired fields all have the same first dimension (the rows), are stored."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.pairs = observation_pairs(schema)
        self.fields = {field.name: field for field in schema.fields}
        rows = {self.fields[name].shape[:1] for name in self.pairs}
        if len(rows) != 1 or () in rows:
            raise ConfigError(
                f"a compact ring needs one row an environment: the first dimensions of {list(self.pairs)} must be equal, got "
                f"{[list(self.fields[name].shape) for name in self.pairs]}; use Schema.with_leading(num_envs)"
            )
        self.num_rows = rows.pop()[0]
        self.stored = Schema(
            [field for field in schema.fields if field.name not in self.pairs]
            + [Field(BEGINS, "bool", (self.num_rows,)), Field(EXTENT, "int64", (2,))]
        )

    def num_side_rows(self, capacity: int) -> int:
        """Rows of the side area of a ring of ``capacity`` slots.

        One slot's worth is kept free for the next, one goes to a ring's or a successor's first slot; what remains allows
        every environment one beginning in 32 slots, and at least one.
        """
        return self.num_rows * (3 + capacity // 32)

    def side_bytes(self, capacity: int) -> int:
        """Bytes of the side area."""
        rows = self.num_side_rows(capacity)
        return sum(padded(self.fields[name].nbytes // self.num_rows * rows) for name in self.pairs)

    def build_side(self, capacity: int, data: memoryview) -> dict[str, Array]:
        """The side area's arrays ``(num_side_rows, *row_shape)`` by the name of the field that is not stored."""
        flat, rows = np.frombuffer(data, np.uint8), self.num_side_rows(capacity)
        offset = ring_bytes(self.stored, capacity + 1)
        arrays: dict[str, Array] = {}
        for name in self.pairs:
            field = self.fields[name]
            shape = (rows, *field.shape[1:])
            arrays[name] = np.ndarray(shape, np.dtype(field.dtype), buffer=flat, offset=offset)
            offset += padded(arrays[name].nbytes)
        return arrays
