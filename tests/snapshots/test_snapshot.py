"""The library's own snapshot: the suite that any must pass, and what it promises beyond."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from numa_collectors.errors import NodeCapacityError, NumaCollectorsError, SchemaMismatchError
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec
from numa_collectors.snapshots.memory import NUM_SLOTS, W_CLAIM, W_LATEST, counter_word
from numa_collectors.testing.processes import block_until_killed, child
from numa_collectors.testing.snapshot import MIXED_SPEC, SnapshotConformance, check_weights, planted_weights


class TestWeightSnapshot(SnapshotConformance):
    def make_snapshot(self, spec: WeightSpec) -> WeightSnapshot:
        return WeightSnapshot.create(spec)


def publish_and_stop(pipe: Connection, snapshot: WeightSnapshot, num_whole: int, stage: str) -> None:
    publisher = snapshot.publisher()
    for _ in range(num_whole):
        version = publisher.version + 1
        publisher.publish(planted_weights(version), version)

    def copy(slot: int) -> None:
        views = publisher._views[slot]
        if stage == "half-written":
            views["weight"][...] = -1.0
            views["mean"][:100] = -1.0
        block_until_killed(pipe, publisher.version)

    publisher._write(copy, publisher.version + 1)


@pytest.mark.parametrize("stage", ["odd", "half-written"])
@pytest.mark.parametrize("num_whole", [1, 2, 3])
def test_a_publisher_killed_in_the_odd_state_stops_nobody(stage: str, num_whole: int) -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        reader = snapshot.reader()
        with child(publish_and_stop, snapshot, num_whole, stage) as publisher:
            last = publisher.receive()
            publisher.kill()
        assert last == num_whole - 1
        assert sum(snapshot._memory.words[counter_word(slot)] % 2 for slot in range(NUM_SLOTS)) == 1
        assert reader.poll() == last
        check_weights(reader.weights, last)
        successor = snapshot.publisher()
        assert successor.version == last
        for version in (last + 1, last + 2, last + 3):
            successor.publish(planted_weights(version), version)
            assert reader.poll() == version
            check_weights(reader.weights, version)


def intrude(reader: Any, action: Callable[[], None], times: int) -> None:
    """Run ``action`` after the data of a copy were read and before they are checked."""
    left = [times]

    class Slots(list[np.ndarray]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            copied = found.copy()
            if left[0]:
                left[0] -= 1
                action()
            return copied

    reader._slots = Slots(reader._slots)


@pytest.mark.parametrize(
    ("num_publishes", "accepted"), [(1, True), (NUM_SLOTS - 1, True), (NUM_SLOTS, False), (NUM_SLOTS + 1, False)]
)
def test_a_copy_is_thrown_away_when_its_slot_was_written_again(num_publishes: int, accepted: bool) -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        publisher, reader = snapshot.publisher(), snapshot.reader()
        publisher.publish(planted_weights(1), 1)

        def publish() -> None:
            for _ in range(num_publishes):
                version = publisher.version + 1
                publisher.publish(planted_weights(version), version)

        intrude(reader, publish, 1)
        assert reader.poll() == (1 if accepted else 1 + num_publishes)
        assert reader.num_retries == (not accepted)
        check_weights(reader.weights, reader.version)


def test_retries_are_bounded_and_old_weights_stay() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        publisher, reader = snapshot.publisher(), snapshot.reader()
        publisher.publish(planted_weights(0), 0)
        reader.poll()
        publisher.publish(planted_weights(1), 1)

        def publish() -> None:
            for _ in range(NUM_SLOTS):
                version = publisher.version + 1
                publisher.publish(planted_weights(version), version)

        intrude(reader, publish, 1000)
        assert reader.poll() is None
        assert 1 <= reader.num_retries <= 8
        assert reader.version == 0
        check_weights(reader.weights, 0)


def test_weights_before_any_load_are_an_error() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot, pytest.raises(NumaCollectorsError, match="poll"):
        _ = snapshot.reader().weights


def test_a_second_live_publisher_is_refused() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        first = snapshot.publisher()
        with pytest.raises(NumaCollectorsError, match=rf"live publisher already \(pid {os.getpid()}\)"):
            snapshot.publisher()
        first.publish(planted_weights(4), 4)
        first.close()
        assert snapshot.publisher().version == 4
        with pytest.raises(NumaCollectorsError, match="closed"):
            first.publish(planted_weights(5), 5)


def test_a_recycled_pid_is_not_taken_for_the_publisher() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        snapshot.publisher()
        snapshot._memory.words[W_CLAIM + 1] -= 1
        snapshot.publisher()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_publisher_is_refused_in_a_forked_child() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        publisher = snapshot.publisher()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                publisher.publish(planted_weights(0), 0)
            except NumaCollectorsError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert snapshot.latest == -1


def test_both_sides_must_hold_the_same_tensors() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        other = WeightSpec(reversed(MIXED_SPEC.tensors))
        with pytest.raises(SchemaMismatchError, match="other tensors"):
            WeightSnapshot(snapshot.region, other, "snapshot")
        snapshot._memory.words[0] = 1
        with pytest.raises(SchemaMismatchError, match="no snapshot"):
            WeightSnapshot(snapshot.region, MIXED_SPEC, "snapshot")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("", "float32", ()),
        ("x", "object", ()),
        ("x", "float32", (0,)),
        ("x", "nonsense", ()),
        ("x", ">f4", ()),
        ("x", "U3", ()),
    ],
)
def test_tensors_that_cannot_be_shared_are_refused(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        TensorSpec(name, dtype, shape)


def test_specs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WeightSpec([])
    with pytest.raises(ValueError, match="more than once: x"):
        WeightSpec([TensorSpec("x", "bool"), TensorSpec("x", "bool")])
    with pytest.raises(ValueError, match="TensorSpec"):
        WeightSpec(["x"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="expected a WeightSpec"):
        WeightSnapshot.create({})  # type: ignore[arg-type]


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(NodeCapacityError):
        WeightSnapshot.create(WeightSpec([TensorSpec("x", "uint8", (1 << 45,))]))


def test_like_takes_arrays_and_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    spec = WeightSpec.like(
        {
            "a": np.zeros((2, 3), np.float32),
            "b": torch.zeros(5, dtype=torch.bfloat16),
            "c": torch.zeros((), dtype=torch.int64),
        }
    )
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in spec.tensors] == [
        ("a", "float32", (2, 3)),
        ("b", "bfloat16", (5,)),
        ("c", "int64", ()),
    ]
    assert spec.offsets == {"a": 0, "b": 64, "c": 128}
    assert spec.nbytes == 192
    assert pickle.loads(pickle.dumps(spec)).fingerprint == spec.fingerprint


def test_bfloat16_travels_as_its_bits() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.randn(100).to(torch.bfloat16)
    spec = WeightSpec.like({"w": weights})
    with WeightSnapshot.create(spec) as snapshot:
        publisher, reader = snapshot.publisher(), snapshot.reader()
        publisher.publish({"w": weights.view(torch.uint16).numpy()}, 1)
        reader.poll()
        assert torch.equal(torch.from_numpy(reader.weights["w"]).view(torch.bfloat16), weights)


def test_weights_stay_after_closing() -> None:
    snapshot = WeightSnapshot.create(MIXED_SPEC)
    publisher, reader = snapshot.publisher(), snapshot.reader()
    publisher.publish(planted_weights(3), 3)
    reader.poll()
    snapshot.close()
    snapshot.close()
    check_weights(reader.weights, 3)
    assert snapshot.region.closed


def test_the_latest_word_names_version_and_slot() -> None:
    with WeightSnapshot.create(MIXED_SPEC) as snapshot:
        publisher = snapshot.publisher()
        slots = []
        for version in range(4):
            publisher.publish(planted_weights(version), version)
            assert snapshot.latest == version
            slots.append(snapshot._memory.words[W_LATEST] & 1)
        assert slots[:-1] != slots[1:]
