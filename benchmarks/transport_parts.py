"""What the transport benchmark measures besides throughput: CPU of a small slot, fences, hand-over times, snapshots."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.transport_arms import PER_ENV
from numa_collectors import _futex
from numa_collectors.rings import TransitionRing, wait_any
from numa_collectors.snapshots import TensorSpec, WeightSnapshot, WeightSpec

TIMEOUT_S = 60.0


def per_call_ns(action: Callable[[int], None], count: int, repeats: int = 5) -> float:
    """Least CPU nanoseconds per element of ``action(count)``: the repeat that was disturbed least."""
    taken = []
    for _ in range(repeats):
        start = time.process_time_ns()
        action(count)
        taken.append((time.process_time_ns() - start) / count)
    return min(taken)


def push_and_pop_ns(options: argparse.Namespace) -> dict[str, float]:
    """CPU of a 516-byte slot through the ring within one process, each part apart."""
    count = 2_000 if options.quick else 20_000
    values = {field.name: np.ones(field.shape, field.dtype) for field in PER_ENV.fields}
    with TransitionRing.create(PER_ENV, capacity=64) as ring:
        producer, consumer = ring.producer(), ring.consumer()
        target = {field.name: np.ones((64, *field.shape), field.dtype) for field in PER_ENV.fields}
        targets = [{name: array[:num_slots] for name, array in target.items()} for num_slots in range(9)]

        def push(source: Mapping[str, Any]) -> None:
            for _ in range(64):
                producer.push(source, timeout_s=0)

        def drain(max_slots: int, copy: bool) -> None:
            while (span := consumer.peek(max_slots)) is not None:
                num_slots = span.num_slots
                if copy:
                    for name, array in targets[num_slots].items():
                        array[...] = span[name]
                consumer.release(num_slots)

        def measure(source: Mapping[str, Any], max_slots: int, copy: bool) -> tuple[float, float]:
            """Least nanoseconds a slot of any 64 in a row: short enough to be left alone even on a busy machine."""
            best = (float("inf"), float("inf"))
            for _ in range(count // 64):
                start = time.perf_counter_ns()
                push(source)
                pushed = time.perf_counter_ns()
                drain(max_slots, copy)
                drained = time.perf_counter_ns()
                best = (min(best[0], (pushed - start) / 64), min(best[1], (drained - pushed) / 64))
            return best

        source = producer.source(values)
        push_ns, pop_ns = measure(source, 1, False)
        return {
            "push_ns": push_ns,
            "push_without_source_ns": measure(values, 1, False)[0],
            "pop_ns": pop_ns,
            "pop_with_copy_ns": measure(source, 1, True)[1],
            "pop_with_copy_in_spans_of_8_ns": measure(source, 8, True)[1],
        }


def fences(options: argparse.Namespace) -> dict[str, float]:
    """Nanoseconds of the fences that exist here."""
    count = 10_000 if options.quick else 100_000

    def loop(begin: Callable[[], object], end: Callable[[], object]) -> Callable[[int], None]:
        def run(rounds: int) -> None:
            for _ in range(rounds):
                begin()
                end()

        return run

    measured = {"default": per_call_ns(loop(*_futex.make_fence()), count)}
    if _futex._membarrier_available():
        measured["membarrier"] = per_call_ns(loop(_futex._membarrier, _futex._nothing), count)
    measured["two_calls_that_do_nothing"] = per_call_ns(loop(_futex._nothing, _futex._nothing), count)
    return measured


def _pin(cpu: int | None) -> None:
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})


@contextlib.contextmanager
def _on_first_cpu() -> Iterator[list[int | None]]:
    """This process on the first CPU; gives the others, last first, for the processes at the other side.

    They are told theirs by number: a child is born with its parent's mask, and could not find the others by itself.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield [None]
        return
    before = os.sched_getaffinity(0)
    first, *others = sorted(before)
    os.sched_setaffinity(0, {first})
    yield list(reversed(others)) or [None]
    os.sched_setaffinity(0, before)


def _paced(pipe: Connection, ring: TransitionRing, cpu: int | None, gap_s: float, count: int) -> None:
    """Commit a slot every ``gap_s`` seconds, looking at the clock all the time, so that this side never sleeps."""
    _pin(cpu)
    producer = ring.producer()
    values = {field.name: np.ones(field.shape, field.dtype) for field in ring.schema.fields}
    pipe.recv()
    for _ in range(count):
        until = time.perf_counter() + gap_s
        while time.perf_counter() < until:
            continue
        producer.push(values, timeout_s=TIMEOUT_S)
    producer.close()
    ring.close()


def _handover(cpu: int | None, gap_s: float, count: int) -> dict[str, float]:
    """Microseconds from commit to a consumer that has the slot in hand, the producer being on ``cpu``."""
    context = multiprocessing.get_context("spawn")
    with TransitionRing.create(PER_ENV.with_leading(32), capacity=8) as ring:
        pipe, theirs = context.Pipe()
        process = context.Process(target=_paced, args=(theirs, ring, cpu, gap_s, count), daemon=True)
        process.start()
        theirs.close()
        consumer = ring.consumer()
        pipe.send("go")
        taken_us = []
        while not consumer.closed:
            wait_any([consumer], TIMEOUT_S)
            span = consumer.peek(1)
            if span is None:
                continue
            taken_us.append((time.monotonic_ns() - int(span.timestamps_ns[0])) / 1e3)
            consumer.release(1)
        process.join(TIMEOUT_S)
        process.close()
        pipe.close()
        return {
            "median_us": statistics.median(taken_us),
            "p99_us": float(np.quantile(taken_us, 0.99)),
            "over_200_ms": sum(value > 2e5 for value in taken_us),
            "count": len(taken_us),
        }


def handovers(options: argparse.Namespace) -> dict[str, Any]:
    """Hand-over times while both run and while the consumer sleeps, and what a waiting consumer costs."""
    with _on_first_cpu() as others:
        measured: dict[str, Any] = {
            "both_running": _handover(others[0], 15e-6, 2_000 if options.quick else 50_000),
            "consumer_asleep": _handover(others[0], 2e-3, 100 if options.quick else 1_000),
        }
        if options.handovers:
            measured["many"] = _handover(others[0], 0.0, options.handovers)
    with TransitionRing.create(PER_ENV, capacity=8) as ring:
        consumer = ring.consumer()
        wall, cpu = time.perf_counter(), time.process_time()
        consumer.wait(1.0 if options.quick else 5.0)
        measured["idle_share_of_a_core"] = (time.process_time() - cpu) / (time.perf_counter() - wall)
    return measured


def _read(pipe: Connection, snapshot: WeightSnapshot, cpu: int | None) -> None:
    _pin(cpu)
    reader = snapshot.reader()
    pipe.send("ready")
    num_loads = 0
    while not pipe.poll(0):
        for _ in range(50):
            num_loads += reader.poll() is not None
    pipe.send((num_loads, reader.num_retries))
    pipe.close()
    snapshot.close()


def _publish_ms(snapshots_: list[WeightSnapshot], count: int, pause_s: float) -> list[float]:
    publishers = [snapshot.publisher() for snapshot in snapshots_]
    image = np.zeros(snapshots_[0].spec.nbytes, np.uint8)
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        for publisher in publishers:
            publisher.publish_bytes(image.data, publisher.version + 1)
        taken.append((time.perf_counter() - start) * 1e3)
        if pause_s:
            time.sleep(pause_s)
    for publisher in publishers:
        publisher.close()
    return taken


def _against_readers(
    nbytes: int, cpus: list[int | None], count: int, *, stopped: bool, pause_s: float
) -> dict[str, float]:
    """Publish to as many snapshots as there are ``cpus``, each with a reader there in a loop or stopped."""
    context = multiprocessing.get_context("spawn")
    spec = WeightSpec([TensorSpec("flat", "float32", (nbytes // 4,))])
    made = [WeightSnapshot.create(spec) for _ in cpus]
    pipes, processes = [], []
    for cpu, snapshot in zip(cpus, made, strict=True):
        pipe, theirs = context.Pipe()
        process = context.Process(target=_read, args=(theirs, snapshot, cpu), daemon=True)
        process.start()
        theirs.close()
        pipe.recv()
        pipes.append(pipe)
        processes.append(process)
    if stopped:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGSTOP)
    taken_ms = _publish_ms(made, count, pause_s)
    if stopped:
        for process in processes:
            os.kill(process.pid or 0, signal.SIGCONT)
    counts = []
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send("stop")
        counts.append(pipe.recv())
        process.join(TIMEOUT_S)
        process.close()
        pipe.close()
    for snapshot in made:
        snapshot.close()
    return {
        "publish_median_ms": statistics.median(taken_ms),
        "publish_p99_ms": float(np.quantile(taken_ms, 0.99)),
        "loads_per_publish": statistics.mean(loads for loads, _ in counts) / count,
        "retries": sum(retries for _, retries in counts),
    }


def snapshots(options: argparse.Namespace) -> dict[str, Any]:
    """Publishing with running and with stopped readers, loads against a publisher without pause, polls with nothing
    new.
    """
    count = 100 if options.quick else 2_000
    spec = WeightSpec([TensorSpec("flat", "float32", (1 << 18,))])
    with WeightSnapshot.create(spec) as snapshot:
        reader = snapshot.reader()

        def poll(rounds: int) -> None:
            for _ in range(rounds):
                reader.poll()

        measured: dict[str, Any] = {"poll_nothing_new_ns": per_call_ns(poll, 50_000)}
        publisher = snapshot.publisher()
        image = np.zeros(spec.nbytes, np.uint8)
        times = []
        for version in range(count):
            start = time.perf_counter()
            publisher.publish_bytes(image.data, version)
            reader.poll()
            times.append((time.perf_counter() - start) * 1e3)
        measured["publish_and_load_1_mib_ms"] = statistics.median(times)
    with _on_first_cpu() as others:
        measured["no_pause_1_mib"] = _against_readers(1 << 20, others[:1], count, stopped=False, pause_s=0)
        measured["paced_1_mib"] = _against_readers(1 << 20, others[:1], count, stopped=False, pause_s=0.001)
        measured["stopped_1_mib"] = _against_readers(1 << 20, others[:1], count, stopped=True, pause_s=0.001)
    return measured
