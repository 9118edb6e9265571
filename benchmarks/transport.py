"""Rings and snapshots against a C ring, against no protocol at all, and against what else there is.

    python -m benchmarks.transport [--quick] [--peers] [--json out.json]

Everything is a ratio within one run: two processes on two cores, all arms interleaved, medians.  Beside it stands a
probe of what passing a cache line costs between the two cores just then: hosts move virtual cores, and above about
170 ns every ring, the C one included, falls to a fraction.  Not a test: nothing fails here but the comparison with
the bars is printed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transport_arms import (
    BYTES_PER_ENV,
    Arm,
    BareArm,
    InPlaceArm,
    RingArm,
    Skipped,
    SpinArm,
    compile_spin_ring,
)
from benchmarks.transport_parts import fences, handovers, push_and_pop_ns, snapshots
from benchmarks.transport_peers import peers

SIZES = {"16 KiB": 16 << 10, "256 KiB": 256 << 10, "2 MiB": 2 << 20, "8 MiB": 8 << 20}
BARS_C_RING = {"16 KiB": 0.55, "256 KiB": 0.75, "2 MiB": 0.85, "8 MiB": 0.90}
BARS_MOTRIX = {"16 KiB": 10.0, "256 KiB": 2.5, "2 MiB": 1.5, "8 MiB": 1.0}
FAR_NS = 170.0


@dataclass
class Result:
    """One arm at one size: slots per second and CPU microseconds per slot and side, one entry a sample."""

    slots_per_s: list[float] = field(default_factory=list)
    producer_us: list[float] = field(default_factory=list)
    consumer_us: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in vars(self).items()}


def pin(cpu: int | None) -> None:
    """Stay on one CPU where the system can be told."""
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})


def serve(pipe: Connection, arms: list[Arm], cpu: int | None) -> None:
    """The producing process: does what it is told, and answers with the CPU seconds that it took."""
    pin(cpu)
    for arm in arms:
        arm.open_producer()
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        what, index, count = order
        start = time.process_time()
        arm = arms[index]
        if what == "ping" and isinstance(arm, SpinArm):
            arm.ping_pong(count, begins=False)
        else:
            arm.produce(count)
        pipe.send(time.process_time() - start)
    for arm in arms:
        arm.close()


class Pair:
    """This process as consumer and a spawned one as producer, each on a core of its own where there are two."""

    def __init__(self, arms: list[Arm]) -> None:
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
        self.arms = arms
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, arms, cpus[-1]), daemon=True)
        self.process.start()
        theirs.close()
        pin(cpus[0])
        for arm in arms:
            arm.open_consumer()
        self.pipe.recv()

    def sample(self, index: int, count: int, result: Result | None = None) -> float:
        """Move ``count`` slots through an arm; returns slots per second."""
        cpu, start = time.process_time(), time.perf_counter()
        self.pipe.send(("move", index, count))
        self.arms[index].consume(count)
        taken_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        producer_s = self.pipe.recv()
        taken_s = max(taken_s, time.perf_counter() - start) if isinstance(self.arms[index], BareArm) else taken_s
        if result is not None:
            result.slots_per_s.append(count / taken_s)
            result.producer_us.append(producer_s / count * 1e6)
            result.consumer_us.append(cpu_s / count * 1e6)
        return count / taken_s

    def ping_ns(self, index: int, rounds: int = 20_000) -> float:
        """Nanoseconds for one hand-over of a cache line."""
        arm = self.arms[index]
        if not isinstance(arm, SpinArm):
            return float("nan")
        self.pipe.send(("ping", index, rounds))
        start = time.perf_counter()
        arm.ping_pong(rounds, begins=True)
        taken_s = time.perf_counter() - start
        self.pipe.recv()
        return taken_s / rounds / 2 * 1e9

    def close(self, affinity: set[int] | None) -> None:
        self.pipe.send(None)
        self.process.join(60)
        self.process.close()
        self.pipe.close()
        for arm in self.arms:
            arm.close()
        if affinity:
            os.sched_setaffinity(0, affinity)


def make_arms(num_envs: int, library: Path | None, *, with_peers: bool, skipped: dict[str, str]) -> list[Arm]:
    """Every arm that can run here, and why the others cannot."""
    arms: list[Arm] = [BareArm(num_envs), RingArm(num_envs), InPlaceArm(num_envs)]
    if library is not None:
        arms.insert(1, SpinArm(num_envs, library))
    for name, make in peers() if with_peers else ():
        try:
            arms.append(make(num_envs))
        except (ImportError, Skipped, OSError) as error:
            skipped[name] = f"{type(error).__name__}: {error}"
    return arms


def throughput(
    size_bytes: int, library: Path | None, options: argparse.Namespace, skipped: dict[str, str]
) -> tuple[dict[str, Result], list[float]]:
    """Samples of every arm at one slot size, interleaved, and the probe's nanoseconds."""
    affinity = set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    arms = make_arms(round(size_bytes / BYTES_PER_ENV), library, with_peers=options.peers, skipped=skipped)
    pair = Pair(arms)
    results = {arm.name: Result() for arm in arms}
    counts = [max(8, int(pair.sample(index, 24) * options.sample_s)) for index in range(len(arms))]
    counts = [
        max(8, int(pair.sample(index, min(count, 2000)) * options.sample_s)) for index, count in enumerate(counts)
    ]
    pings = []
    for _ in range(options.samples):
        pings.append(pair.ping_ns(1))
        for index, arm in enumerate(arms):
            pair.sample(index, counts[index], results[arm.name])
    pair.close(affinity)
    return results, pings


def facts() -> dict[str, Any]:
    """The machine, in words."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def table(label: str, results: dict[str, Result], pings: list[float]) -> Iterator[str]:
    """Lines of one size, with shares of the C ring and of the bare pair."""
    bare = results[BareArm.name].summary()["slots_per_s"]
    spinning = results.get(SpinArm.name)
    yield f"\n{label}: cache line {statistics.median(pings):.0f} ns" if spinning else f"\n{label}"
    for name, result in results.items():
        summary = result.summary()
        share = f"{summary['slots_per_s'] / spinning.summary()['slots_per_s']:6.2f}" if spinning else "     -"
        yield (
            f"  {name:28s} {summary['slots_per_s']:12,.0f} slots/s  {share} of the C ring  "
            f"{summary['slots_per_s'] / bare:6.2f} of the bare pair  "
            f"CPU {summary['producer_us']:8.2f} + {summary['consumer_us']:8.2f} us/slot"
        )


def verdicts(label: str, results: dict[str, Result]) -> Iterator[tuple[str, float, float]]:
    """Name, measured ratio and bar of what the issue asks at one size; ratios of medians."""
    ring, bare = (results[name].summary()["slots_per_s"] for name in (RingArm.name, BareArm.name))
    if SpinArm.name in results:
        spinning = results[SpinArm.name].summary()["slots_per_s"]
        # What copies without any protocol reach bounds what the interpreter can on this machine at this time.
        yield f"ring / C ring, {label} (bare pair: {bare / spinning:.2f})", ring / spinning, BARS_C_RING[label]
    if "motrix ring" in results:
        yield f"ring / motrix, {label}", ring / results["motrix ring"].summary()["slots_per_s"], BARS_MOTRIX[label]
    own = {BareArm.name, SpinArm.name, RingArm.name, InPlaceArm.name, "motrix ring"}
    others = [result.summary()["slots_per_s"] for name, result in results.items() if name not in own]
    if others:
        yield f"ring / best of the others, {label}", ring / max(others), 1.0 if label == "8 MiB" else 2.0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Throughput and latency of rings and snapshots.")
    parser.add_argument(
        "--quick", action="store_true", help="small samples: shows that it runs, its figures mean little"
    )
    parser.add_argument("--peers", action="store_true", help="also measure queues, pipes and other libraries' rings")
    parser.add_argument("--handovers", type=int, default=0, help="also count slow hand-overs among this many")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    options.samples = 3 if options.quick else 7
    options.sample_s = 0.03 if options.quick else 0.3
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run everything; the exit status is 0 whatever the figures are."""
    options = parse(arguments)
    report: dict[str, Any] = {"machine": facts(), "throughput": {}, "bars": [], "skipped": {}}
    print(json.dumps(report["machine"]))
    try:
        library: Path | None = compile_spin_ring()
    except Skipped as reason:
        library = None
        report["skipped"]["C ring"] = str(reason)
    for label, size_bytes in SIZES.items():
        results, pings = throughput(size_bytes, library, options, report["skipped"])
        print("\n".join(table(label, results, pings)), flush=True)
        report["throughput"][label] = {
            "cache_line_ns": pings,
            "far": statistics.median(pings) > FAR_NS,
            "arms": {name: vars(result) for name, result in results.items()},
        }
        report["bars"] += verdicts(label, results)
    print()
    for name, measure in (
        ("push_pop_516", push_and_pop_ns),
        ("fences_ns", fences),
        ("handover", handovers),
        ("snapshot", snapshots),
    ):
        report[name] = measure(options)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
    print("\nratio   bar")
    for name, ratio, bar in report["bars"]:
        print(f"{ratio:6.2f} {bar:6.2f}  {'met ' if ratio >= bar else 'MISS'}  {name}")
    for name, why in report["skipped"].items():
        print(f"skipped: {name}: {why}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
