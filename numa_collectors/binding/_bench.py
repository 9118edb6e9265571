"""What binding can win here: copy bandwidth and load latency from each node's CPUs to each node's memory.

Assumes: the machine is otherwise idle.  Time is the thread's own CPU time, so that being preempted does not count, but
others' traffic on memory and caches does.
Not covered: what a core's own caches hide.  A simulator that lives in its cache wins nothing, whatever the table says.

The latency is that of dependent loads in random order over 64 MiB, walked by the interpreter, less the same walk inside a
page; it includes address-translation misses, as a simulator's own loads do.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from numa_collectors import _mempolicy, _nodes
from numa_collectors._cpulist import format_cpulist
from numa_collectors.topo.model import Topology

__all__ = ["BenchPair", "BenchReport", "bench"]

_MIB = 1 << 20
_COPY_BYTES = 32 * _MIB
_MAX_COPY_THREADS = 4
_CHAIN_BYTES = 64 * _MIB
_CHAIN_STEP_BYTES = 256
_CHAIN_WORDS = _CHAIN_STEP_BYTES // 8
_LEAST_S = 0.1


@dataclass(frozen=True)
class BenchPair:
    """Memory of ``memory_node`` as the CPUs of ``cpu_node`` see it; bandwidth counts bytes read plus bytes written."""

    cpu_node: int
    memory_node: int
    bandwidth_gb_s: float
    latency_ns: float

    @property
    def is_local(self) -> bool:
        return self.cpu_node == self.memory_node


@dataclass(frozen=True)
class BenchReport:
    """The table, what could not be measured, and what it means in one line."""

    pairs: tuple[BenchPair, ...]
    verdict: str
    skipped: tuple[str, ...] = ()
    num_threads: int = 0

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'CPUs of':>8} {'memory of':>10} {'copy GB/s':>10} {'latency ns':>11}"] if self.pairs else []
        for pair in self.pairs:
            note = "" if pair.is_local else "  remote"
            lines.append(
                f"{'node ' + str(pair.cpu_node):>8} {'node ' + str(pair.memory_node):>10} {pair.bandwidth_gb_s:>10.1f} "
                f"{pair.latency_ns:>11.0f}{note}"
            )
        return "\n".join([*lines, *self.skipped, self.verdict])


def _run_on(cpus: tuple[int, ...], action: Callable[[], float]) -> float:
    """Run ``action`` in a throwaway thread pinned to ``cpus``; raise what it raises."""
    found: list[float] = []
    failed: list[BaseException] = []

    def body() -> None:
        try:
            os.sched_setaffinity(0, cpus)
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            failed.append(error)

    thread = threading.Thread(target=body, name="numa-collectors-bench", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


@contextlib.contextmanager
def _memory(node: int, size_bytes: int) -> Iterator[mmap.mmap]:
    """Yield private memory whose every page was seen on ``node``; raise ``OSError`` where that cannot be had."""
    _nodes.check_room("the benchmark", size_bytes, (f"node {node}", _nodes.node_headroom_bytes(node)))
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _mempolicy.mbind(address, size_bytes, _mempolicy.MPOL_BIND, (node,))
        with memoryview(memory) as view, view[:: mmap.PAGESIZE] as pages:
            pages[:] = bytes(len(pages))
        statuses = _mempolicy.move_pages_status(range(address, address + size_bytes, mmap.PAGESIZE))
        if set(statuses) != {node}:
            raise OSError(f"pages that were bound to node {node} are not all there")
        yield memory


def _copy_gb_s(memory: mmap.mmap) -> float:
    """Copy one half of ``memory`` to the other until the clock has something to measure; ctypes releases the GIL for it."""
    half = len(memory) // 2
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memmove(address, address + half, half)
    rounds, start = 0, time.thread_time()
    while (elapsed := time.thread_time() - start) < _LEAST_S or rounds < 2:
        ctypes.memmove(address, address + half, half)
        rounds += 1
    return 2 * half * rounds / elapsed / 1e9


def _bandwidth(cpus: tuple[int, ...], node: int) -> float:
    """Return the sum over a few threads, each with memory of its own."""
    chosen = cpus[:_MAX_COPY_THREADS]
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(_memory(node, 2 * _COPY_BYTES)) for _ in chosen]
        results: list[float] = []
        failed: list[BaseException] = []

        def one(cpu: int, memory: mmap.mmap) -> None:
            try:
                results.append(_run_on((cpu,), lambda: _copy_gb_s(memory)))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                failed.append(error)

        threads = [threading.Thread(target=one, args=pair) for pair in zip(chosen, memories, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return sum(results)


def _write_chain(words: memoryview, num_links: int) -> None:
    """Write one random cycle over ``num_links`` places, each in lines of its own."""
    order = list(range(num_links))
    random.Random(0).shuffle(order)
    for here, there in zip(order, order[1:] + order[:1], strict=True):
        words[here * _CHAIN_WORDS] = there * _CHAIN_WORDS


def _walk_ns(words: memoryview, num_steps: int) -> float:
    place = 0
    start = time.thread_time_ns()
    for _ in range(num_steps):
        place = words[place]
    return (time.thread_time_ns() - start) / num_steps


def _latency(cpus: tuple[int, ...], memory: mmap.mmap) -> float:
    num_links = len(memory) // _CHAIN_STEP_BYTES

    def measure() -> float:
        with memoryview(memory) as view, view.cast("Q") as words:
            far = min(_walk_ns(words, num_links) for _ in range(2))
        near_words = memoryview(bytearray(mmap.PAGESIZE)).cast("Q")
        _write_chain(near_words, mmap.PAGESIZE // _CHAIN_STEP_BYTES)
        near = min(_walk_ns(near_words, num_links // 4) for _ in range(3))
        return max(0.0, far - near)

    return _run_on(cpus[:1], measure)


def _pair(cpu_node: int, cpus: tuple[int, ...], memory_node: int) -> BenchPair:
    with _memory(memory_node, _CHAIN_BYTES) as memory:
        with memoryview(memory) as view, view.cast("Q") as words:
            _write_chain(words, len(memory) // _CHAIN_STEP_BYTES)
        # The copies in between leave nothing of the chain in a cache.
        bandwidth = _bandwidth(cpus, memory_node)
        return BenchPair(cpu_node, memory_node, bandwidth, _latency(cpus, memory))


def bench(topology: Topology) -> BenchReport:
    """Measure each pair of a node with CPUs and a node with memory, within what this process may use.

    About a second a pair; 64 MiB on the node for latency and as much for each of up to four copying threads.  On a machine
    with one such pair nothing is measured, since there is nothing to win.
    """
    sources = {
        node.id: cpus for node in topology.nodes if (cpus := tuple(c for c in node.cpus if c in topology.allowed))
    }
    targets = [
        node.id
        for node in topology.nodes
        if node.kind in ("normal", "memory-only") and node.id in topology.nodes_allowed
    ]
    if len(sources) * len(targets) < 2 or len(targets) < 2:
        return BenchReport((), "one node with memory is usable here: all memory is local, binding has nothing to win")
    pairs: list[BenchPair] = []
    skipped: list[str] = []
    for cpu_node, cpus in sources.items():
        for memory_node in targets:
            try:
                pairs.append(_pair(cpu_node, cpus, memory_node))
            except (OSError, MemoryError) as error:
                skipped.append(f"node {cpu_node} to node {memory_node}: not measured ({error})")
    num_threads = min(_MAX_COPY_THREADS, *(len(cpus) for cpus in sources.values()))
    return BenchReport(tuple(pairs), verdict(pairs), tuple(skipped), num_threads)


def verdict(pairs: list[BenchPair]) -> str:
    """Return in one line what binding can win at most."""
    local = [pair for pair in pairs if pair.is_local]
    remote = [pair for pair in pairs if not pair.is_local]
    if not local or not remote:
        return "nothing to compare: local and remote memory could not both be measured"
    latency = sum(pair.latency_ns for pair in local) / len(local)
    bandwidth = sum(pair.bandwidth_gb_s for pair in local) / len(local)
    worst = max(remote, key=lambda pair: pair.latency_ns)
    thin = min(remote, key=lambda pair: pair.bandwidth_gb_s)
    slower = worst.latency_ns / latency if latency else 1.0
    share = thin.bandwidth_gb_s / bandwidth if bandwidth else 1.0
    if slower < 1.05 and share > 0.95:
        return "remote memory is as fast as local memory here: binding has next to nothing to win"
    return (
        f"remote memory costs up to {slower:.2f}x the latency ({latency:.0f} -> {worst.latency_ns:.0f} ns, node "
        f"{worst.cpu_node} to {format_cpulist([worst.memory_node])}) and gives down to {100 * share:.0f} % of the copy "
        "bandwidth: binding can win that at most, where a worker waits for memory"
    )
