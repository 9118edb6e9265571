"""Schemas, capacities and what is refused at construction."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from numa_collectors.errors import NodeCapacityError, SchemaMismatchError
from numa_collectors.rings import Field, Schema, TransitionRing

SMALL = Schema([Field("obs", "float32", (3,)), Field("done", "bool")])


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("x", "object", (1,)),
        ("x", "O", ()),
        ("x", "float32", (0,)),
        ("x", "float32", (3, 0)),
        ("x", "float32", (-1,)),
        ("", "float32", (1,)),
        ("x", "no such dtype", (1,)),
        ("x", ">f4", (1,)),
        ("x", "M8[s]", (1,)),
        ("x", "U4", (1,)),
        ("x", "V4", (1,)),
        ("x", "f4,i4", (1,)),
    ],
)
def test_fields_that_cannot_be_shared_are_refused(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"field"):
        Field(name, dtype, shape)


def test_schemas_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one field"):
        Schema([])
    with pytest.raises(ValueError, match="more than once: x"):
        Schema([Field("x", "bool"), Field("y", "bool"), Field("x", "int8")])
    with pytest.raises(ValueError, match="Field objects"):
        Schema(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least 1"):
        SMALL.with_leading(0)


def test_with_leading_puts_the_shard_first() -> None:
    assert [field.shape for field in SMALL.with_leading(4).fields] == [(4, 3), (4,)]


def test_a_schema_survives_pickling_with_its_fingerprint() -> None:
    copy = pickle.loads(pickle.dumps(SMALL))
    assert copy == SMALL
    assert copy.fingerprint == SMALL.fingerprint


def test_fingerprints_tell_name_dtype_shape_and_order_apart() -> None:
    schemas = [
        SMALL,
        Schema(reversed(SMALL.fields)),
        Schema([Field("obs", "float64", (3,)), Field("done", "bool")]),
        Schema([Field("obs", "float32", (3, 1)), Field("done", "bool")]),
        Schema([Field("observation", "float32", (3,)), Field("done", "bool")]),
    ]
    assert len({schema.fingerprint for schema in schemas}) == len(schemas)


NOTHING = [{"capacity": 0}, {"capacity": -1}, {"capacity": 2.0}, {"max_bytes": 0}, {"max_bytes": 100}]


@pytest.mark.parametrize("wrong", NOTHING)
def test_capacities_that_hold_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"capacity|max_bytes"):
        TransitionRing.create(SMALL, **wrong)


def test_a_lead_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_lead_slots"):
        TransitionRing.create(SMALL, capacity=4, max_lead_slots=0)


def test_what_is_no_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Schema"):
        TransitionRing.create({"obs": "float32"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field_bytes", "wanted", "slots"),
    [
        (64, {}, 256),
        (1 << 20, {}, 15),
        (64 << 20, {"capacity": 1}, 1),
        (1 << 20, {"capacity": 3}, 3),
        (1 << 20, {"capacity": 100, "max_bytes": 4 << 20}, 3),
        (1 << 20, {"capacity": 2, "max_bytes": 4 << 20}, 2),
    ],
)
def test_capacity_is_bounded_by_bytes(field_bytes: int, wanted: dict[str, int], slots: int) -> None:
    with TransitionRing.create(Schema([Field("x", "uint8", (field_bytes,))]), **wanted) as ring:
        assert ring.capacity == slots


def test_more_memory_than_there_is_is_refused_with_numbers() -> None:
    with pytest.raises(NodeCapacityError, match=r"need|bytes|GiB|TiB"):
        TransitionRing.create(Schema([Field("x", "uint8", (1 << 40,))]), capacity=64)


def test_the_other_side_must_hold_the_same_schema() -> None:
    with TransitionRing.create(SMALL, capacity=2) as ring:
        other = Schema([Field("obs", "float32", (4,)), Field("done", "bool")])
        with pytest.raises(SchemaMismatchError, match="another schema"):
            TransitionRing(ring.region, other, "ring")
        ring.region.buf[0] = 0
        with pytest.raises(SchemaMismatchError, match="no ring"):
            TransitionRing(ring.region, SMALL, "ring")


def test_no_two_slots_share_a_cache_line() -> None:
    schema = Schema([Field("a", "uint8", (3,)), Field("b", "float64", (9,)), Field("c", "bool")])
    with TransitionRing.create(schema, capacity=4) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        lines: dict[int, tuple[str, int]] = {}
        for index in range(4):
            slot = producer.try_reserve()
            assert slot is not None
            for name, array in slot.items():
                assert array.ctypes.data % 64 == 0
                for line in range(array.ctypes.data // 64, -(-(array.ctypes.data + array.nbytes) // 64)):
                    assert lines.setdefault(line, (name, index)) == (name, index)
            producer.commit()
            del slot, array
        assert ring.region.address % 4096 == 0
        span = consumer.peek()
        assert span is not None
        assert span["b"].shape == (4, 9)
        assert span["c"].shape == (4,)
        assert all(
            array.dtype == np.int64 for array in (span.versions, span.steps, span.generations, span.timestamps_ns)
        )
