"""The learner's longest gap between two updates when a collector is killed and its replacement starts.

    python -m benchmarks.recovery [--arms trainer,pool] [--kills 7] [--json out.json]

A learner that never waits for data notes when each of its updates ends; one of two collectors is killed by SIGKILL again
and again.  A kill's window reaches from the signal until its replacement has been stepping for half a second, so that it
holds the death, the restart and the start of the new process.  Before each kill the same learner runs undisturbed for two
seconds.  ``trainer``: ``FanOutTrainer``, whose learner has a process of its own.  ``pool``: a loop in this process, which
itself notices the death and orders the restart.

The new process takes a second of CPU time to import what it needs.  Where no CPU is free for it, the learner's gap is the
scheduler's: compare with the undisturbed windows, and measure on a quiet machine with a core for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.transport import facts
from numa_collectors.collector import Collector, CollectorContext
from numa_collectors.config import RunConfig
from numa_collectors.learner import LearnerContext
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.rings import Field, Schema
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.trainer import FanOutTrainer

BOUND_MS = 100.0
SETTLE_S = 0.5
QUIET_S = 2.0
PATIENCE_S = 300.0
SCHEMA = Schema([Field("obs", "float32", (64,)), Field("reward", "float32")])
WEIGHTS = WeightSpec([TensorSpec("w", "float32", (256, 256))])


class Window(NamedTuple):
    """One stretch of time, CLOCK_MONOTONIC in nanoseconds."""

    begin_ns: int
    end_ns: int


class MarkedCollector(Collector):
    """Slots every two milliseconds; its first of each generation writes ``pid, generation`` into ``folder``."""

    def __init__(self, ctx: CollectorContext, *, folder: Path) -> None:
        self._ctx = ctx
        self._mark: Path | None = folder / f"{ctx.rank}.{ctx.generation}"

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        if self._mark is not None:
            aside = self._mark.with_suffix(".tmp")
            aside.write_text(str(os.getpid()))
            aside.rename(self._mark)
            self._mark = None
        time.sleep(0.002)
        slot["obs"][:] = 1.0
        slot["reward"][:] = 1.0


class TimedLearner:
    """Updates of half a millisecond of arithmetic, each noted; the notes are written with the final checkpoint."""

    def __init__(self, ctx: LearnerContext | None = None, *, notes: Path) -> None:
        torch.set_num_threads(1)
        self._weights = torch.eye(256)
        self._notes = notes
        self.ends_ns: list[int] = []

    def ingest(self, rank: int, batch: Mapping[str, torch.Tensor]) -> None:
        batch["obs"].mean()

    def update(self, num_updates: int) -> dict[str, float]:
        if len(self.ends_ns) == 500:
            (self._notes.parent / "begun").touch()
        for _ in range(num_updates):
            self._weights = torch.tanh(self._weights @ self._weights)
            self.ends_ns.append(time.monotonic_ns())
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self._weights}

    def state_dict(self) -> dict[str, Any]:
        np.save(self._notes, np.array(self.ends_ns))
        return {"w": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weights = state["w"]


def await_collector(folder: Path, generation: int, over: threading.Event) -> int | None:
    """Wait for collector 1 of ``generation`` to make slots; return its pid, or None once the run is over."""
    path = folder / f"1.{generation}"
    begun = folder / "begun"  # a death while the run still starts ends it
    while not (path.exists() and begun.exists()):
        if over.wait(0.002):
            return None
    return int(path.read_text())


def kill_again_and_again(folder: Path, num_kills: int, over: threading.Event) -> tuple[list[Window], list[Window]]:
    """Kill collector 1 again and again; return the quiet windows and those of the kills."""
    quiet: list[Window] = []
    killed: list[Window] = []
    pid = await_collector(folder, 0, over)
    for generation in range(1, num_kills + 1):
        over.wait(SETTLE_S)
        begin_ns = time.monotonic_ns()
        over.wait(QUIET_S)
        quiet.append(Window(begin_ns, time.monotonic_ns()))
        if pid is None:
            break
        begin_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGKILL)
        pid = await_collector(folder, generation, over)
        over.wait(SETTLE_S)
        killed.append(Window(begin_ns, time.monotonic_ns()))
    return quiet, killed


class Killer(threading.Thread):
    """Runs :func:`kill_again_and_again` beside a run, and then ends the run as Ctrl-C does."""

    def __init__(self, folder: Path, num_kills: int) -> None:
        super().__init__(name="killer")
        self._order = partial(kill_again_and_again, folder, num_kills)
        self.over = threading.Event()
        self.windows: tuple[list[Window], list[Window]] = ([], [])

    def run(self) -> None:
        self.windows = self._order(self.over)
        if not self.over.is_set():
            os.kill(os.getpid(), signal.SIGINT)


def trainer_arm(folder: Path, num_kills: int) -> tuple[np.ndarray, tuple[list[Window], list[Window]]]:
    """Return the ends of the updates in ns, and the windows."""
    config = RunConfig(
        num_envs=8,
        num_collectors=2,
        oversubscribe=True,
        total_env_steps=10**9,
        utd_mode="learner_bound",
        learner_device="cpu",
        collector_inference_device="cpu",
        on_collector_exit="restart",
        max_restarts=num_kills,
        restart_backoff_s=0.0,
        start_timeout_s=PATIENCE_S,
        checkpoint_interval_s=None,
        run_dir=folder / "run",
        tensorboard=False,
        console="quiet",
    )
    notes = folder / "updates.npy"
    trainer = FanOutTrainer(
        config,
        collector=partial(MarkedCollector, folder=folder),
        learner=partial(TimedLearner, notes=notes),
        schema=SCHEMA,
        weights=WEIGHTS,
    )
    killer = Killer(folder, num_kills)
    killer.start()
    try:
        trainer.run()
    finally:
        killer.over.set()
        killer.join()
    return np.load(notes), killer.windows


def pool_arm(folder: Path, num_kills: int) -> tuple[np.ndarray, tuple[list[Window], list[Window]]]:
    """As :func:`trainer_arm`, with a loop of one's own."""
    options = PoolOptions(
        num_envs=8,
        num_collectors=2,
        on_collector_exit="restart",
        max_restarts=num_kills,
        restart_backoff_s=0.0,
        start_timeout_s=PATIENCE_S,
    )
    learner = TimedLearner(notes=folder / "updates.npy")
    collector = partial(MarkedCollector, folder=folder)
    killer = Killer(folder, num_kills)
    interrupted = threading.Event()
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.set())
    try:
        with CollectorPool(
            collector, schema=SCHEMA, weights=WEIGHTS, options=options, on_message=lambda text: None
        ) as pool:
            pool.publish(learner.weights())
            killer.start()
            while not interrupted.is_set():
                for rank, span in pool.drain(max_slots=8):
                    learner.ingest(rank, pool.tensors(rank, span))
                learner.update(1)
                pool.publish(learner.weights())
            killer.join()
    finally:
        killer.over.set()
        signal.signal(signal.SIGINT, previous)
    return np.array(learner.ends_ns), killer.windows


def longest_gaps_ms(ends_ns: np.ndarray, windows: Sequence[Window]) -> list[float]:
    """Return the longest time between two updates in each window, in ms."""
    gaps = []
    for window in windows:
        inside = ends_ns[(ends_ns >= window.begin_ns) & (ends_ns <= window.end_ns)]
        points = np.concatenate([[window.begin_ns], inside, [window.end_ns]])
        gaps.append(float(np.diff(points).max()) / 1e6)
    return gaps


def lines(arm: str, ends_ns: np.ndarray, windows: tuple[list[Window], list[Window]]) -> Iterator[str]:
    quiet, killed = (longest_gaps_ms(ends_ns, part) for part in windows)
    yield f"{arm}: {len(ends_ns)} updates, median {np.median(np.diff(ends_ns)) / 1e6:.2f} ms apart"
    for name, gaps in (("undisturbed", quiet), ("around a kill", killed)):
        each = " ".join(f"{gap:.1f}" for gap in gaps)
        yield f"  longest gap {name:14s} median {statistics.median(gaps):6.1f} ms, most {max(gaps):6.1f} ms   ({each})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arms", default="trainer,pool", help="which, comma-separated")
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {"machine": facts(), "longest_gap_ms": {}}
    print("\n".join(f"{name}: {value}" for name, value in report["machine"].items()))
    good = True
    for arm in chosen.arms.split(","):
        run = {"trainer": trainer_arm, "pool": pool_arm}[arm]
        with tempfile.TemporaryDirectory() as folder:
            ends_ns, windows = run(Path(folder), chosen.kills)
        print("\n".join(lines(arm, ends_ns, windows)), flush=True)
        quiet, killed = (longest_gaps_ms(ends_ns, part) for part in windows)
        report["longest_gap_ms"][arm] = {"undisturbed": quiet, "around a kill": killed}
        good = good and statistics.median(killed) < BOUND_MS
    print(f"median below {BOUND_MS:g} ms: {'yes' if good else 'no'}; load now {os.getloadavg()}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
