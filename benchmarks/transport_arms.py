"""Ways to move slots from one process to another, each with the same six fields: the library's ring, a C ring, and
peers.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from numa_collectors.rings import Field, Schema, TransitionRing
from numa_collectors.shm import Region

Array = npt.NDArray[Any]

BYTES_PER_ENV = 516
PER_ENV = Schema(
    [
        Field("obs", "float32", (56,)),
        Field("critic_obs", "float32", (56,)),
        Field("action", "float32", (12,)),
        Field("reward", "float32"),
        Field("done", "int64"),
        Field("truncated", "int64"),
    ]
)
CAPACITY = 8
TIMEOUT_S = 60.0


class Skipped(Exception):
    """This arm cannot run here, for the reason given."""


class Arm:
    """One way; made in the parent, pickled to the child, opened on each side."""

    name = "arm"

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def values(self) -> dict[str, Array]:
        """The producer's arrays, in memory of its own."""
        return {field.name: np.ones(field.shape, field.dtype) for field in PER_ENV.with_leading(self.num_envs).fields}

    def copies(self) -> dict[str, Array]:
        """The consumer's arrays for a ringful of slots."""
        return {
            field.name: np.ones((CAPACITY, *field.shape), field.dtype)
            for field in PER_ENV.with_leading(self.num_envs).fields
        }

    def open_producer(self) -> None:
        """Called once in the child."""

    def open_consumer(self) -> None:
        """Called once in the parent, after the child was started."""

    def produce(self, num_slots: int) -> None:
        raise NotImplementedError

    def consume(self, num_slots: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Give back what was taken, on either side."""


class RingArm(Arm):
    """The library's ring with its default waiting: push, and one copy a field of each span."""

    name = "ring"

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self.ring = TransitionRing.create(PER_ENV.with_leading(num_envs), capacity=CAPACITY)
        self.max_slots = max(1, min(CAPACITY // 2, (512 << 10) // self.ring.schema.slot_bytes))

    def open_producer(self) -> None:
        self.producer = self.ring.producer()
        self.source = self.producer.source(self.values())

    def open_consumer(self) -> None:
        self.consumer = self.ring.consumer()
        self.target = self.copies()
        self.targets = [[(name, array[:count]) for name, array in self.target.items()] for count in range(CAPACITY + 1)]

    def produce(self, num_slots: int) -> None:
        push, source = self.producer.push, self.source
        for _ in range(num_slots):
            push(source, timeout_s=TIMEOUT_S)

    def consume(self, num_slots: int) -> None:
        consumer, targets, max_slots = self.consumer, self.targets, self.max_slots
        while num_slots:
            span = consumer.peek(max_slots)
            if span is None:
                consumer.wait(TIMEOUT_S)
                continue
            count = span.num_slots
            for name, array in targets[count]:
                array[...] = span[name]
            consumer.release(count)
            num_slots -= count

    def close(self) -> None:
        self.ring.close()


class InPlaceArm(RingArm):
    """The library's ring when the environment writes into the slot itself: the producer copies nothing."""

    name = "ring in place"

    def produce(self, num_slots: int) -> None:
        producer = self.producer
        for _ in range(num_slots):
            producer.reserve(TIMEOUT_S)
            producer.commit()


class BareArm(RingArm):
    """Both sides copy, nobody waits for anybody: no protocol can be faster."""

    name = "bare pair"

    def open_producer(self) -> None:
        super().open_producer()
        self.slots: list[dict[str, Array]] = []
        for _ in range(CAPACITY):
            slot = self.producer.reserve(0)
            if slot is None:
                raise RuntimeError("a fresh ring is full")
            self.slots.append(dict(slot))
            self.producer.commit()

    def open_consumer(self) -> None:
        super().open_consumer()
        self.spans: list[dict[str, Array]] = []

    def produce(self, num_slots: int) -> None:
        pairs = [[(slot[name], value) for name, value in self.source.items()] for slot in self.slots]
        for index in range(num_slots):
            for view, value in pairs[index % CAPACITY]:
                view[...] = value

    def consume(self, num_slots: int) -> None:
        if not self.spans:
            while self.consumer.fill < CAPACITY:
                self.consumer.wait(TIMEOUT_S)
            span = self.consumer.peek()
            if span is None:
                raise RuntimeError("a full ring has no span")
            self.spans = [{name: span[name][index] for name in span} for index in range(CAPACITY)]
        pairs = [
            [(self.target[name][index], view) for name, view in slot.items()] for index, slot in enumerate(self.spans)
        ]
        for index in range(num_slots):
            for array, view in pairs[index % CAPACITY]:
                array[...] = view

    def close(self) -> None:
        self.spans = []
        self.slots = []
        super().close()


class _CField(ctypes.Structure):
    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("private_copy", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("stride", ctypes.c_size_t),
        ("private_stride", ctypes.c_size_t),
    )


def compile_spin_ring() -> Path:
    """Build the C yardstick; Skipped without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise Skipped("no C compiler")
    target = Path(tempfile.mkdtemp(prefix="spin-ring-")) / "spin_ring.so"
    source = Path(__file__).with_name("spin_ring.c")
    built = subprocess.run(
        [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode:
        raise Skipped(f"the C ring does not build: {built.stderr.strip()[:200]}")
    return target


class SpinArm(Arm):
    """A spinning ring in C over the same arrays: the yardstick."""

    name = "C ring, spinning"

    def __init__(self, num_envs: int, library: Path) -> None:
        super().__init__(num_envs)
        self.library = library
        self.schema = PER_ENV.with_leading(num_envs)
        self.region = Region.create("spin-ring", 4096 + CAPACITY * self.schema.slot_bytes)

    def _open(self, private: Mapping[str, Array], private_slots: int) -> None:
        self.private = private
        fields = []
        offset = 4096
        for field in self.schema.fields:
            stride = -(-field.nbytes // 64) * 64
            array = private[field.name]
            fields.append(
                _CField(
                    self.region.address + offset, array.ctypes.data, field.nbytes, stride, array.nbytes // private_slots
                )
            )
            offset += CAPACITY * stride
        self.fields = (_CField * len(fields))(*fields)
        self.calls = ctypes.CDLL(str(self.library))

    def open_producer(self) -> None:
        self._open(self.values(), 1)

    def open_consumer(self) -> None:
        self._open(self.copies(), CAPACITY)

    def _call(self, function: Any, num_slots: int) -> None:
        function(
            ctypes.c_void_p(self.region.address + 128),
            ctypes.c_void_p(self.region.address + 256),
            ctypes.c_uint64(num_slots),
            ctypes.c_uint64(CAPACITY),
            self.fields,
            len(self.fields),
        )

    def produce(self, num_slots: int) -> None:
        self._call(self.calls.spin_produce, num_slots)

    def consume(self, num_slots: int) -> None:
        self._call(self.calls.spin_consume, num_slots)

    def ping_pong(self, num_rounds: int, *, begins: bool) -> None:
        """One side of the cache-line probe."""
        words = [ctypes.c_void_p(self.region.address + offset) for offset in (1024, 2048)]
        mine, theirs = words if begins else reversed(words)
        self.calls.ping_pong(mine, theirs, ctypes.c_uint64(num_rounds), int(begins))

    def close(self) -> None:
        self.region.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("num_envs", "library", "schema", "region")}
