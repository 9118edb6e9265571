"""What the chaos tests send, and how its receiver proves that it is whole, complete and in order.  Imports no torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from numa_collectors.rings import Field, Schema, Span
from numa_collectors.snapshots import TensorSpec, WeightSpec

__all__ = ["SCHEMA", "WEIGHTS", "HalfCopy", "Ledger", "check_weights", "die", "fill", "weights_of"]

_FILLING = 512
SCHEMA = Schema(
    [
        Field("collector", "int64"),
        Field("generation", "int64"),
        Field("step", "int64"),
        Field("serial", "int64"),
        Field("filling", "int64", (_FILLING,)),
    ]
)
# Large enough that a copy of it takes a while.
WEIGHTS = WeightSpec([TensorSpec("first", "int64", (60_000,)), TensorSpec("last", "int64", (60_000,))])


def die() -> NoReturn:
    """End this process as an operator, a scheduler or an out-of-memory killer would: nothing more is run in it."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived its SIGKILL")


def _mark(rank: int, generation: int, step: int, serial: int) -> int:
    """A number that belongs to one slot alone."""
    return (((rank * 1_000 + generation) * 100_000 + step) * 1_000_000 + serial) % (1 << 62)


def fill(
    slot: Mapping[str, np.ndarray], rank: int, generation: int, step: int, serial: int, *, half: bool = False
) -> None:
    """Write one slot; ``step`` counts within the generation, ``serial`` within the ring.  ``half``: leave it torn."""
    slot["collector"][...] = rank
    slot["serial"][...] = serial
    slot["filling"][..., : _FILLING // 2] = _mark(rank, generation, step, serial)
    if half:
        return
    slot["filling"][..., _FILLING // 2 :] = _mark(rank, generation, step, serial)
    slot["step"][...] = step
    slot["generation"][...] = generation


def weights_of(version: int) -> dict[str, np.ndarray]:
    """Return weights that say of every element which version they are."""
    return {name: np.full(60_000, version, np.int64) for name in WEIGHTS.names}


def check_weights(weights: Mapping[str, np.ndarray], version: int, before: int, *, numbered: bool = True) -> None:
    """Raise AssertionError unless ``weights`` are one whole version, newer than ``before``.

    ``numbered``: their elements are the version itself; otherwise any number that all of them share.
    """
    assert version > before, f"weights fell from version {before} to {version}"
    expected = version if numbered else weights[WEIGHTS.names[0]][0]
    for name, array in weights.items():
        assert (array == expected).all(), f"tensor {name!r} of version {version} holds {np.unique(array)[:5].tolist()}"


class HalfCopy:
    """Stands in for an array: an assignment to all of it copies a half and ends the process."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __setitem__(self, key: Any, value: np.ndarray) -> None:
        half = len(self._array) // 2
        self._array[:half] = value[:half]
        die()


class Ledger:
    """The books of a receiver: of every collector, each slot once, whole and in order; versions that never fall.

    ``begun``: the receiver sees the run from its first slot on; otherwise the first slot that comes may be any.
    """

    def __init__(self, num_collectors: int, *, begun: bool = True) -> None:
        self.serials: list[int | None] = [0 if begun else None] * num_collectors
        """The serial that comes next, by rank."""
        self.counts = [0] * num_collectors
        self._newest = [(-1, -1)] * num_collectors
        self._versions = [0] * num_collectors

    def take(self, rank: int, slots: Mapping[str, Any], span: Span | None = None) -> tuple[int, int]:
        """Check a run of slots (fields ``(num_slots, num_envs, ...)``); return its first and its last serial."""
        fields = {name: np.asarray(slots[name]) for name in SCHEMA.names}
        keys = np.stack([fields[name].reshape(len(fields["step"]), -1) for name in SCHEMA.names[:4]])
        assert (keys == keys[:, :, :1]).all(), f"collector[{rank}]: rows of different slots in one: {keys.tolist()}"
        first = int(keys[3, 0, 0])
        for index, (collector, generation, step, serial) in enumerate(keys[:, :, 0].T.tolist()):
            where = f"collector[{rank}], slot {serial}, generation {generation}, step {step}"
            assert collector == rank, f"{where}: written by collector[{collector}]"
            filling = fields["filling"][index]
            assert (filling == _mark(collector, generation, step, serial)).all(), f"{where}: half-written"
            self._follow(rank, generation, step, serial, where)
            if span is not None:
                self._compare(span, rank, index, (generation, serial), where)
        return first, serial

    def _follow(self, rank: int, generation: int, step: int, serial: int, where: str) -> None:
        expected, (last_generation, last_step) = self.serials[rank], self._newest[rank]
        assert expected in (None, serial), f"{where}: expected slot {expected}"
        if expected is not None:
            begins_anew = generation > last_generation and step == 0
            goes_on = generation == last_generation and step == last_step + 1
            assert begins_anew or goes_on, f"{where}: after step {last_step} of generation {last_generation}"
        self.serials[rank] = serial + 1
        self._newest[rank] = (generation, step)
        self.counts[rank] += 1

    def _compare(self, span: Span, rank: int, index: int, expected: tuple[int, int], where: str) -> None:
        found = (int(span.generations[index]), int(span.steps[index]))
        assert found == expected, f"{where}: the record says generation {found[0]}, step {found[1]}"
        version = int(span.versions[index])
        assert version >= self._versions[rank], f"{where}: version {version} after {self._versions[rank]}"
        self._versions[rank] = version
