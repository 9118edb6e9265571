"""From cumulative counters of workers to the scalars of a log point.

*Guarantees.* A rate is a difference of two reports over the time between these two, never over the log interval, so
that reports that arrive at another pace than points are written do not show as 0 and double.  Nothing is divided by a
time base that is not there.  Each point has its own step.  A collector's totals stay exact over restarts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numa_collectors.metrics.bottleneck import Bottleneck, find_bottleneck
from numa_collectors.metrics.counters import Counters, LagStats, Ledger, add_counts, lag_stats
from numa_collectors.metrics.names import collector_tag
from numa_collectors.metrics.sinks import Sink

__all__ = ["LogPoint", "MetricsHub", "Window", "WorkerView"]

logger = logging.getLogger(__name__)

_NOT_STAGES = frozenset({"collect_ns", "wait_space_ns", "time_ns"})


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the console shows of one collector over the interval; None where nothing is known yet."""

    name: str
    generation: int
    env_steps_per_s: float | None
    wait_space_pct: float | None
    ring_fill: float | None
    lag: LagStats | None
    placement: str


@dataclass(frozen=True, slots=True)
class LogPoint:
    """One point of the run: what the sinks get and what the console shows."""

    step: int
    updates: int
    target_env_steps: int | None
    elapsed_s: float
    eta_s: float | None
    scalars: Mapping[str, float]
    collectors: tuple[WorkerView, ...]
    bottleneck: Bottleneck


@dataclass(slots=True)
class Window:
    """Where an interval began: what each worker had reported then, and when."""

    collectors: dict[int, tuple[float, dict[str, float]]] = field(default_factory=dict)
    learner: tuple[int, float, Counters] | None = None


@dataclass(slots=True)
class _Placement:
    pages_on_node: int | None
    pages_total: int | None
    drift: int
    text: str


class MetricsHub:
    """Takes the workers' counters (see :mod:`numa_collectors.metrics.counters`) and writes log points to the sinks.

    Not thread-safe: one thread, the one that supervises the run, owns it.
    """

    def __init__(
        self,
        num_collectors: int,
        sinks: Sequence[Sink] = (),
        *,
        target_env_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledgers = [Ledger() for _ in range(num_collectors)]
        self._sinks = list(sinks)
        self._target = target_env_steps
        self._clock = clock
        self._begin_s = clock()
        self._learner: tuple[int, float, Counters] | None = None
        self._first_learner: tuple[float, int] | None = None
        self._placements: dict[str, _Placement] = {}
        self._last_step: int | None = None
        self._log_window = Window()

    def begin(self) -> None:
        """Start the clock: called when the workers are ready, so that their start is not counted as slow stepping."""
        self._begin_s = self._clock()

    def update_collector(self, rank: int, counters: Counters, generation: int = 0) -> None:
        """Take the newest report of a collector."""
        self._ledgers[rank].update(dict(counters), generation, self._time_of(counters))

    def update_learner(self, counters: Counters, generation: int = 0) -> None:
        """Take the newest report of the learner."""
        moment = self._time_of(counters)
        held: Counters = self._learner[2] if self._learner is not None and self._learner[0] == generation else {}
        self._learner = (generation, moment, {**held, **counters})
        if self._first_learner is None:
            self._first_learner = (moment, int(counters.get("env_steps", 0)))
        # A first report, and the first of a restarted learner, only sets the base: its totals may contain a history.
        if self._log_window.learner is None or self._log_window.learner[0] != generation:
            # A restarted learner takes up the run at an earlier step.
            self._last_step = None
            self._log_window.learner = self._learner

    def update_placement(
        self, worker: str, pages_on_node: int | None, pages_total: int | None, *, drift: int = 0, text: str = ""
    ) -> None:
        """Take what a worker's bind report or recheck found; ``worker`` is ``"learner"`` or ``"collector_<i>"``.

        None, or a total of 0, for a worker that is not bound: it writes no tag.
        """
        self._placements[worker] = _Placement(pages_on_node, pages_total, drift, text)

    def totals(self) -> dict[str, float]:
        """Return the collectors' counters summed over all of them and all generations."""
        sums: dict[str, float] = {}
        for ledger in self._ledgers:
            for name, value in ledger.totals().items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def collector_totals(self, rank: int) -> dict[str, float]:
        """Return one collector's counters summed over its generations, as for a checkpoint."""
        return self._ledgers[rank].totals()

    def window(self) -> Window:
        """Return a window that begins now, for a console with an interval of its own."""
        window = Window(learner=self._learner)
        self._rebase(window)
        return window

    def point(self, window: Window | None = None) -> LogPoint:
        """Return the interval since ``window`` (None: since the last log point) without ending it."""
        base = self._log_window if window is None else window
        if window is not None and self._learner and (base.learner is None or base.learner[0] != self._learner[0]):
            base.learner = self._learner
        scalars: dict[str, float] = {}
        stage_ms: dict[str, float] = {}
        self._learner_scalars(base, scalars)
        views = self._collector_scalars(base, scalars, stage_ms)
        self._worker_scalars(base, scalars)
        counters: Counters = self._learner[2] if self._learner else {}
        step = int(counters.get("env_steps", 0))
        return LogPoint(
            step=step,
            updates=int(counters.get("updates", 0)),
            target_env_steps=self._target,
            elapsed_s=self._clock() - self._begin_s,
            eta_s=self._eta_s(step),
            scalars=scalars,
            collectors=views,
            bottleneck=find_bottleneck(scalars, stage_ms),
        )

    def log(self) -> LogPoint | None:
        """Write a point to every sink and begin the next interval; None where the step has not advanced since the last.

        A sink that fails is reported once with its traceback and left out from then on: the run goes on.
        """
        if self._learner is None or not self._has_time_base():
            return None
        step = int(self._learner[2].get("env_steps", 0))
        if self._last_step is not None and step <= self._last_step:
            return None
        point = self.point()
        self._write(point)
        self._last_step = step
        self._rebase(self._log_window)
        return point

    def close(self) -> None:
        """Close every sink."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            try:
                sink.close()
            except Exception:  # as for a write: the run is over, and its outcome does not depend on a sink
                logger.exception("%s failed to close", type(sink).__name__)

    def add_sink(self, sink: Sink) -> None:
        """Have a further sink get the points from now on."""
        self._sinks.append(sink)

    def _time_of(self, counters: Counters) -> float:
        time_ns = counters.get("time_ns")
        return self._clock() if time_ns is None else time_ns / 1e9

    def _has_time_base(self) -> bool:
        base = self._log_window.learner
        return base is not None and self._learner is not None and self._learner[1] > base[1]

    def _write(self, point: LogPoint) -> None:
        wall_time = time.time()
        for sink in list(self._sinks):
            try:
                sink.write(point.scalars, point.step, wall_time)
            except Exception:  # a sink is the user's code or the disk's state; neither may end a training run
                self._sinks.remove(sink)
                logger.exception("%s failed and gets no further metrics; the run goes on", type(sink).__name__)

    def _rebase(self, window: Window) -> None:
        window.learner = self._learner
        for rank, ledger in enumerate(self._ledgers):
            if ledger.time_s is not None:
                window.collectors[rank] = (ledger.time_s, ledger.totals())

    def _eta_s(self, step: int) -> float | None:
        if self._target is None or self._learner is None or self._first_learner is None:
            return None
        first_s, first_step = self._first_learner
        elapsed, done = self._learner[1] - first_s, step - first_step
        if elapsed <= 0 or done <= 0:
            return None
        return max(0, self._target - step) * elapsed / done

    def _learner_scalars(self, base: Window, scalars: dict[str, float]) -> None:
        if self._learner is None or base.learner is None:
            return
        (_, now_s, now), (_, before_s, before) = self._learner, base.learner
        scalars["async/weight_version"] = now.get("weight_version", 0)
        if now.get("env_steps", 0) > 0:
            scalars["async/utd"] = now.get("updates", 0) / now["env_steps"]
        fills = now.get("ring_fill") or {}
        if fills:
            scalars["async/ring_fill"] = sum(fills.values()) / len(fills)
        for name, value in (now.get("train") or {}).items():
            scalars[f"train/{name}"] = value
        if now_s > before_s:
            _learner_rates(_delta(now, before), now_s - before_s, scalars)

    def _collector_scalars(
        self, base: Window, scalars: dict[str, float], stage_ms: dict[str, float]
    ) -> tuple[WorkerView, ...]:
        lags = self._lag_deltas(base)
        _lag_scalars(scalars, "", lag_stats(add_counts(lags.values())))
        sums: dict[str, float] = {}
        rates: list[float] = []
        waits: list[float] = []
        views: list[WorkerView] = []
        fills = (self._learner[2].get("ring_fill") or {}) if self._learner else {}
        several = len(self._ledgers) > 1
        for rank, ledger in enumerate(self._ledgers):
            delta, seconds = self._collector_delta(base, rank)
            rate = wait = None
            if delta is not None:
                rate = delta.get("env_steps", 0) / seconds if seconds > 0 else 0.0
                # A wait is counted when it ends, and may have begun before the interval.
                wait = min(100.0, 100 * delta.get("wait_space_ns", 0) / 1e9 / seconds) if seconds > 0 else None
                rates.append(rate)
                waits += [] if wait is None else [wait]
                for name, value in delta.items():
                    sums[name] = sums.get(name, 0) + value
            lag = lag_stats(lags.get(rank, {}))
            view = WorkerView(
                f"collector[{rank}]", ledger.generation, rate, wait, fills.get(rank), lag, self._placement_text(rank)
            )
            views.append(view)
            if several:
                _each_scalars(scalars, rank, view, delta or {})
        if rates:
            scalars["perf/env_steps_per_s"] = sum(rates)
        if waits:
            scalars["wait/space_pct"] = sum(waits) / len(waits)
        _sum_scalars(scalars, sums, stage_ms)
        return tuple(views)

    def _placement_text(self, rank: int) -> str:
        placement = self._placements.get(f"collector_{rank}")
        return "" if placement is None else placement.text

    def _collector_delta(self, base: Window, rank: int) -> tuple[dict[str, float] | None, float]:
        ledger = self._ledgers[rank]
        if ledger.time_s is None:
            return None, 0.0
        before_s, before = base.collectors.get(rank, (self._begin_s, {}))
        totals = ledger.totals()
        return {name: value - before.get(name, 0) for name, value in totals.items()}, ledger.time_s - before_s

    def _lag_deltas(self, base: Window) -> dict[int, dict[int, int]]:
        if self._learner is None or base.learner is None:
            return {}
        now: Mapping[int, Mapping[int, int]] = self._learner[2].get("lag") or {}
        before: Mapping[int, Mapping[int, int]] = base.learner[2].get("lag") or {}
        return {
            rank: {lag: count - before.get(rank, {}).get(lag, 0) for lag, count in counts.items()}
            for rank, counts in now.items()
        }

    def _worker_scalars(self, base: Window, scalars: dict[str, float]) -> None:
        for worker, placement in self._placements.items():
            if placement.pages_on_node is not None and placement.pages_total:
                scalars[f"placement/pages_on_node/{worker}"] = placement.pages_on_node / placement.pages_total
                scalars[f"placement/drift/{worker}"] = placement.drift
        for rank, ledger in enumerate(self._ledgers):
            delta, seconds = self._collector_delta(base, rank)
            # A process has used time before its first report: without one in the base there is no interval.
            known = delta is not None and "cpu_s" in base.collectors.get(rank, (0.0, {}))[1]
            _system_scalars(scalars, f"collector_{rank}", ledger.newest, delta if known else None, seconds)
        if self._learner is not None and base.learner is not None:
            now, before = self._learner, base.learner
            _system_scalars(scalars, "learner", now[2], _delta(now[2], before[2]), now[1] - before[1])


def _delta(now: Counters, before: Counters) -> dict[str, float]:
    """Return the differences of the numbers that both have: one that appears late has no base."""
    return {
        name: value - before[name] for name, value in now.items() if isinstance(value, (int, float)) and name in before
    }


def _learner_rates(delta: Mapping[str, float], seconds: float, scalars: dict[str, float]) -> None:
    scalars["perf/updates_per_s"] = delta.get("updates", 0) / seconds
    shares = {
        "perf/learn_pct": "busy_ns",
        "wait/data_pct": "wait_data_ns",
        "transport/ingest_pct": "ingest_ns",
        "transport/publish_pct": "publish_ns",
    }
    for tag, name in shares.items():
        scalars[tag] = 100 * delta.get(name, 0) / 1e9 / seconds
    # Bytes over nanoseconds are GB (10^9 bytes) over seconds.
    if delta.get("ingest_ns", 0) > 0:
        scalars["transport/ingest_gb_per_s"] = delta.get("bytes_ingested", 0) / delta["ingest_ns"]
    if delta.get("publishes", 0) > 0:
        scalars["transport/publish_ms"] = delta.get("publish_ns", 0) / delta["publishes"] / 1e6
    scalars["transport/publish_skips"] = delta.get("publish_skips", 0)


def _sum_scalars(scalars: dict[str, float], sums: Mapping[str, float], stage_ms: dict[str, float]) -> None:
    slots = sums.get("slots", 0)
    if slots > 0:
        scalars["perf/collect_ms_per_batch"] = sums.get("collect_ns", 0) / slots / 1e6
        for stage, value in _stages(sums):
            stage_ms[stage] = scalars[f"perf/collector_{stage}_ms"] = value / slots / 1e6
        scalars.update({name[4:]: value / slots for name, value in sums.items() if name.startswith("sum:")})
    if sums.get("episodes", 0) > 0:
        scalars["rollout/mean_return"] = sums.get("return_sum", 0) / sums["episodes"]
        scalars["rollout/mean_ep_len"] = sums.get("length_sum", 0) / sums["episodes"]


def _each_scalars(scalars: dict[str, float], rank: int, view: WorkerView, delta: Mapping[str, float]) -> None:
    values = {
        "perf/env_steps_per_s": view.env_steps_per_s,
        "wait/space_pct": view.wait_space_pct,
        "async/ring_fill": view.ring_fill,
    }
    scalars.update({collector_tag(tag, rank): value for tag, value in values.items() if value is not None})
    _lag_scalars(scalars, f"/collector_{rank}", view.lag)
    slots = delta.get("slots", 0)
    if slots > 0:
        for stage, value in _stages(delta):
            scalars[collector_tag(f"perf/{stage}_ms", rank)] = value / slots / 1e6


def _stages(counters: Mapping[str, float]) -> list[tuple[str, float]]:
    return [
        (name.removesuffix("_ns"), value)
        for name, value in counters.items()
        if name.endswith("_ns") and name not in _NOT_STAGES and not name.startswith("sum:")
    ]


def _lag_scalars(scalars: dict[str, float], suffix: str, lag: LagStats | None) -> None:
    if lag is not None:
        scalars[f"async/policy_lag{suffix}"] = lag.mean
        scalars[f"lag/min{suffix}"] = lag.min
        scalars[f"lag/p95{suffix}"] = lag.p95
        scalars[f"lag/max{suffix}"] = lag.max


def _system_scalars(
    scalars: dict[str, float], worker: str, newest: Counters, delta: Mapping[str, float] | None, seconds: float
) -> None:
    rss: Any = newest.get("rss_bytes")
    if rss is not None:
        scalars[f"system/rss_mb/{worker}"] = rss / 1e6
    if delta is not None and seconds > 0 and "cpu_s" in delta:
        scalars[f"system/cpu_pct/{worker}"] = 100 * delta["cpu_s"] / seconds
