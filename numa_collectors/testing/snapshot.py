"""Conformance suite of weight snapshots: what any single-publisher snapshot must do.

Subclass :class:`SnapshotConformance` in a pytest module, override :meth:`SnapshotConformance.make_snapshot`, and run
it.  A snapshot under test offers what :class:`numa_collectors.snapshots.WeightSnapshot` offers: ``publisher()``,
``reader()``, ``close()``, and pickling while a child is spawned.
"""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from numa_collectors.errors import SchemaMismatchError
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.testing.processes import CHILD_TIMEOUT_S, child, fail, raises

__all__ = ["MIXED_SPEC", "SnapshotConformance", "check_weights", "planted_weights"]

MIXED_SPEC = WeightSpec(
    [
        TensorSpec("weight", "float32", (31, 7)),
        TensorSpec("half", "bfloat16", (13,)),
        TensorSpec("count", "int64"),
        TensorSpec("mask", "bool", (3, 3)),
        TensorSpec("mean", "float64", (257,)),
    ]
)
"""Tensors of several dtypes and odd sizes."""


def planted_weights(version: int) -> dict[str, Any]:
    """Arrays whose every element follows from ``version``."""
    return {
        "weight": np.full((31, 7), version, np.float32),
        "half": np.full(13, version % 65521, np.uint16),
        "count": np.asarray(version, np.int64),
        "mask": np.full((3, 3), version % 2 == 1),
        "mean": np.full(257, version, np.float64),
    }


def check_weights(weights: Any, version: int) -> None:
    """Fail unless every tensor is wholly of ``version``."""
    for name, expected in planted_weights(version).items():
        if not np.array_equal(weights[name], expected):
            fail(f"tensor {name!r} is not that of version {version}: {np.unique(weights[name])[:5]}")


def _publish_flat(pipe: Connection, snapshot: Any, num_versions: int | None) -> None:
    """Publish versions whose flat image is one repeated number, without pause, up to an end or until killed."""
    publisher = snapshot.publisher()
    image = np.zeros(snapshot.spec.nbytes // 8, np.int64)
    pipe.send(publisher.version)
    end = None if num_versions is None else publisher.version + 1 + num_versions
    while publisher.version + 1 != end:
        version = publisher.version + 1
        image[:] = version
        publisher.publish_bytes(image.data, version)
    pipe.send("done")
    publisher.close()
    snapshot.close()


def _read(pipe: Connection, snapshot: Any) -> None:
    """Load what comes until version 10**6 arrives; then say which versions were loaded."""
    reader = snapshot.reader()
    seen = []
    pipe.send("ready")
    while reader.version < 10**6:
        version = reader.poll()
        if version is not None:
            check_weights(reader.weights, version)
            seen.append(version)
    pipe.send(seen)
    reader.close()
    snapshot.close()


class SnapshotConformance:
    """Tests of one snapshot implementation.  ``num_versions`` is how many the two-process run publishes."""

    num_versions = 30_000

    def make_snapshot(self, spec: WeightSpec) -> Any:
        """Make a snapshot; the suite closes it."""
        raise NotImplementedError

    def test_nothing_is_there_before_the_first_version(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            reader = snapshot.reader()
            if reader.latest != -1 or reader.version != -1 or reader.poll() is not None:
                fail("a fresh snapshot has a version")
            if snapshot.publisher().version != -1:
                fail("a fresh snapshot's publisher has a version")

    def test_every_tensor_arrives_bit_by_bit(self) -> None:
        rng = np.random.default_rng(0)
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            publisher, reader = snapshot.publisher(), snapshot.reader()
            for version in (0, 1, 2, 3, 7, 2**40):
                bits = {
                    name: np.frombuffer(rng.bytes(array.nbytes), array.dtype).reshape(array.shape)
                    for name, array in planted_weights(0).items()
                    if name != "mask"
                }
                bits["mask"] = rng.random((3, 3)) < 0.5
                publisher.publish(bits, version)
                if reader.latest != version or reader.poll() != version or reader.version != version:
                    fail(f"version {version} did not arrive")
                for name, sent in bits.items():
                    if reader.weights[name].tobytes() != sent.tobytes():
                        fail(f"tensor {name!r} arrived with other bits")
                if reader.poll() is not None:
                    fail("a version was loaded twice")

    def test_flat_image_and_mapping_are_the_same(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            publisher, reader = snapshot.publisher(), snapshot.reader()
            image = np.zeros(MIXED_SPEC.nbytes, np.uint8)
            for name, view in MIXED_SPEC.views(image).items():
                view[...] = planted_weights(5)[name]
            publisher.publish(image, 5)
            reader.poll()
            check_weights(reader.weights, 5)

    def test_only_the_newest_version_is_loaded(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            publisher, reader = snapshot.publisher(), snapshot.reader()
            for version in range(1, 6):
                publisher.publish(planted_weights(version), version)
            if reader.poll() != 5:
                fail("not the newest version was loaded")
            check_weights(reader.weights, 5)

    def test_loaded_weights_are_private(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            publisher, reader = snapshot.publisher(), snapshot.reader()
            source = planted_weights(1)
            publisher.publish(source, 1)
            source["weight"][...] = 99
            reader.poll()
            held = dict(reader.weights)
            for version in (2, 3, 4):
                publisher.publish(planted_weights(version), version)
            check_weights(held, 1)
            reader.poll()
            check_weights(held, 1)
            check_weights(reader.weights, 4)

    def test_wrong_weights_publish_nothing(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot:
            publisher, reader = snapshot.publisher(), snapshot.reader()
            good = planted_weights(1)
            publisher.publish(good, 1)
            reader.poll()
            wrong: list[Any] = [
                {name: good[name] for name in good if name != "mean"},
                {**good, "extra": good["mean"]},
                {**good, "weight": good["weight"].astype(np.float64)},
                {**good, "mean": good["mean"][:-1]},
                {**good, "half": good["half"].astype(np.float32)},
                np.zeros(MIXED_SPEC.nbytes - 1, np.uint8),
            ]
            for weights in wrong:
                with raises(SchemaMismatchError):
                    publisher.publish(weights, 2)
            for version in (1, 0, -1):
                with raises(ValueError):
                    publisher.publish(good, version)
            if reader.poll() is not None or publisher.version != 1:
                fail("a refused publish changed something")

    def test_no_torn_and_no_falling_version_against_a_publisher_without_pause(self) -> None:
        for nbytes in (64, 64 << 10):
            spec = WeightSpec([TensorSpec("image", "int64", (nbytes // 8,))])
            num_versions = min(self.num_versions, (256 << 20) // nbytes)
            with (
                self.make_snapshot(spec) as snapshot,
                child(_publish_flat, snapshot, num_versions) as publisher,
            ):
                num_loads = self._read_flat(snapshot.reader(), num_versions - 1)
                publisher.join()
                if num_loads < 2:
                    fail("the reader made no progress")

    def _read_flat(self, reader: Any, end: int) -> int:
        """Load until version ``end``, checking each; returns how many were loaded."""
        num_loads = 0
        deadline = time.monotonic() + CHILD_TIMEOUT_S
        while reader.version < end:
            before = reader.version
            version = reader.poll()
            if version is None:
                if time.monotonic() > deadline:
                    fail(f"the reader was starved at version {reader.version}")
                continue
            num_loads += 1
            image = reader.weights["image"]
            if version <= before or image.min() != version or image.max() != version:
                fail(f"version {version} after {before} holds {np.unique(image)[:5]}")
        return num_loads

    def test_publishers_killed_at_random_stop_nobody(self) -> None:
        spec = WeightSpec([TensorSpec("image", "int64", (1 << 17,))])
        rng = random.Random(8)
        with self.make_snapshot(spec) as snapshot:
            reader = snapshot.reader()
            for _ in range(4):
                with child(_publish_flat, snapshot, None) as publisher:
                    first = publisher.receive()
                    if first < reader.version:
                        fail(f"the successor begins at {first}, but version {reader.version} was loaded")
                    self._read_flat(reader, first + rng.randint(1, 60))
                    publisher.kill()
                before, latest = reader.version, reader.latest
                if reader.poll() != (latest if latest > before else None):
                    fail("the last whole version cannot be loaded after the publisher's death")

    def test_stopped_readers_hold_nobody_up(self) -> None:
        with self.make_snapshot(MIXED_SPEC) as snapshot, child(_read, snapshot) as reader:
            publisher = snapshot.publisher()
            reader.receive()
            os.kill(reader.process.pid or 0, signal.SIGSTOP)
            for version in range(1000):
                publisher.publish(planted_weights(version), version)
            os.kill(reader.process.pid or 0, signal.SIGCONT)
            publisher.publish(planted_weights(10**6), 10**6)
            seen = reader.receive()
            if seen[-1] != 10**6 or seen != sorted(set(seen)):
                fail(f"versions fell or the last one was missed: {seen[-5:]}")
            reader.join()
