"""Fences, futexes, rings and snapshots between two processes on two nodes.

Under emulation CPUs take turns, so that stores are never seen out of order: what is shown here is that the calls exist
and work on this kernel and architecture, not that the fences suffice.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from multiprocessing.context import SpawnProcess

import numpy as np
import pytest
from guest_support import MPOL_BIND, MPOL_DEFAULT, in_child, mapping, set_mempolicy
from guest_workers import DEADLINE_S, collect, nodes_of

from numa_collectors import _futex, _mempolicy
from numa_collectors.errors import RingClosedError
from numa_collectors.rings import Consumer, Field, Schema, TransitionRing
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec

BOTH = pytest.mark.guest("2n", "2n-arm")
NUM_SLOTS = 60
CAPACITY = 8


@BOTH
def test_the_machine_gives_a_fence() -> None:
    strong = os.uname().machine == "x86_64"
    assert _futex.FENCE_AVAILABLE
    assert strong == _futex.STORE_ORDER_STRONG
    for _ in range(100):
        _futex.full_fence()
    if not strong:
        # A lock is no full fence here: it must be the system call.
        begin, _ = _futex.make_fence()
        assert begin is _futex._membarrier
        assert _futex._membarrier_available()


@BOTH
def test_policy_calls_have_this_architectures_numbers_and_widths() -> None:
    assert _mempolicy.supported()
    assert tuple(_mempolicy.mems_allowed()) == (0, 1)
    with mapping(4) as (memory, address):
        _mempolicy.mbind(address, 4 * 4096, _mempolicy.MPOL_BIND, (1,))
        memory[0] = memory[3 * 4096] = 1
        status = _mempolicy.move_pages_status([address + index * 4096 for index in range(4)])
    assert [status[0], status[3]] == [1, 1]
    assert all(value < 0 for value in status[1:3]), "untouched pages are on no node"
    try:
        _mempolicy.set_mempolicy(_mempolicy.MPOL_BIND, (1,))
        mode, nodes = _mempolicy.get_mempolicy()
        assert (mode, tuple(nodes)) == (_mempolicy.MPOL_BIND, (1,))
    finally:
        _mempolicy.set_mempolicy(_mempolicy.MPOL_DEFAULT, ())


def _wait_for_the_word(address: int) -> bool:
    return _futex.futex_wait(address, 0, DEADLINE_S)


@BOTH
def test_a_futex_in_a_memfd_wakes_another_process() -> None:
    descriptor = os.memfd_create("word")
    stop = threading.Event()
    try:
        os.ftruncate(descriptor, 4096)
        with mapping(1, descriptor) as (memory, address):

            def wake() -> None:
                # The sleeper exists only once the kernel has someone to wake.
                while not stop.is_set() and not _futex.futex_wake(address, 1):
                    stop.wait(0.01)

            waker = threading.Thread(target=wake)
            waker.start()
            try:
                assert in_child(_wait_for_the_word, address) is True
            finally:
                stop.set()
                waker.join(DEADLINE_S)
            memory[0] = 1
            assert _futex.futex_wait(address, 0, DEADLINE_S), "a changed word is not slept on"
    finally:
        os.close(descriptor)


def _end(child: SpawnProcess) -> None:
    child.kill()
    child.join()
    child.close()


def _take(consumer: Consumer) -> list[int]:
    """Check and release what is there; return the steps."""
    span = consumer.peek()
    assert span is not None
    steps = span.steps.tolist()
    for index, step in enumerate(steps):
        assert (span["obs"][index] == step).all()
        assert (span["reward"][index] == -step).all()
    num_slots = span.num_slots
    del span
    consumer.release(num_slots)
    return [int(step) for step in steps]


@BOTH
def test_slots_and_weights_pass_between_nodes_whole_and_in_order() -> None:
    schema = Schema((Field("obs", "float32", (4, 100)), Field("reward", "float64", (4,))))
    spec = WeightSpec((TensorSpec("weight", "float32", (1000,)),))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    affinity = os.sched_getaffinity(0)
    with (
        here,
        there,
        TransitionRing.create(schema, capacity=CAPACITY, node=1) as ring,
        WeightSnapshot.create(spec, node=1) as snapshot,
        snapshot.publisher() as publisher,
        ring.consumer() as consumer,
        contextlib.ExitStack() as cleanup,
    ):
        child = context.Process(target=collect, args=(ring, snapshot, NUM_SLOTS, there))
        try:
            set_mempolicy(MPOL_BIND, [1])
            os.sched_setaffinity(0, {2, 3})
            child.start()
        finally:
            set_mempolicy(MPOL_DEFAULT)
            os.sched_setaffinity(0, affinity)
        there.close()
        cleanup.callback(_end, child)
        steps: list[int] = []
        while len(steps) < NUM_SLOTS:
            assert consumer.wait(DEADLINE_S)
            steps += _take(consumer)
            publisher.publish({"weight": np.full(1000, len(steps), dtype=np.float32)}, version=len(steps))
        assert steps == list(range(NUM_SLOTS))
        assert here.poll(DEADLINE_S)
        weights_seen, (ring_nodes, snapshot_nodes, pages, cpus) = here.recv()
        child.join(DEADLINE_S)
        assert child.exitcode == 0
        with pytest.raises(RingClosedError):
            consumer.wait(DEADLINE_S)
        assert nodes_of(ring.region) == nodes_of(snapshot.region) == [1]
    assert ring_nodes == snapshot_nodes == [1]
    assert cpus == [2, 3]
    assert set(pages) == {1}, "private pages of the child on another node"
    assert weights_seen
    for version, low, high in weights_seen:
        assert low == high == version
    assert [version for version, _, _ in weights_seen] == sorted({version for version, _, _ in weights_seen})
