"""What workers report, and the differences that the hub takes between two reports.

Every number is **cumulative** over the worker's life (one generation), so that a report lost on the way loses
nothing: the next one contains it.  A collector's counters begin again at 0 with each generation.  Names, all
optional, times in nanoseconds:

Collector
    ``slots env_steps episodes return_sum length_sum collect_ns wait_space_ns``, ``<stage>_ns`` (``env_step_ns act_ns
    push_ns sync_ns`` and its own), ``sum:<tag>`` (what ``Collector.sums`` returns), ``weight_version`` (in use),
    ``cpu_s rss_bytes``.
Learner
    ``env_steps updates`` (totals of the run, going on after a resume), ``busy_ns`` (in updates), ``ingest_ns
    publish_ns wait_data_ns publishes publish_skips bytes_ingested weight_version cpu_s rss_bytes``; ``ring_fill``
    (rank to share of the capacity, 0 to 1); ``lag`` (rank to :meth:`LagHistogram.counts`); ``train`` (name to the
    latest value).
Both
    ``time_ns``: ``time.monotonic_ns()`` of the report; left out, the time of arrival counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LagHistogram", "LagStats", "Ledger", "lag_stats"]

Counters = Mapping[str, Any]

# Lags from here on share bins by powers of two, which bounds a report's size; a policy so old is broken at any exact
# value.
_EXACT_LAGS = 1024


class LagHistogram:
    """Policy lags of the data that the learner took from one collector, counted since the start."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def record(self, version: int, acted_versions: Iterable[int]) -> None:
        """Count the slots of one span: ``version`` is the learner's, ``acted_versions`` those of the slots."""
        for acted in acted_versions:
            lag = max(0, version - int(acted))
            if lag >= _EXACT_LAGS:
                lag = 1 << (lag.bit_length() - 1)
            self._counts[lag] = self._counts.get(lag, 0) + 1

    def counts(self) -> dict[int, int]:
        """Return lag to number of slots, for the learner's report."""
        return dict(self._counts)


@dataclass(frozen=True, slots=True)
class LagStats:
    """Policy lag in versions over the slots of an interval."""

    min: int
    mean: float
    p95: int
    max: int


def lag_stats(counts: Mapping[int, int]) -> LagStats | None:
    """Return the statistics of ``counts`` (lag to number of slots), or None where nothing was counted."""
    lags = sorted(lag for lag, count in counts.items() if count > 0)
    total = sum(counts[lag] for lag in lags)
    if not total:
        return None
    seen, p95 = 0, lags[-1]
    for lag in lags:
        seen += counts[lag]
        if seen * 100 >= total * 95:
            p95 = lag
            break
    return LagStats(lags[0], sum(lag * counts[lag] for lag in lags) / total, p95, lags[-1])


def add_counts(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of several lag counts."""
    total: dict[int, int] = {}
    for part in parts:
        for lag, count in part.items():
            total[lag] = total.get(lag, 0) + count
    return total


class Ledger:
    """The counters of one collector over all its generations; totals stay exact when a new generation begins at 0."""

    def __init__(self) -> None:
        self._by_generation: dict[int, Counters] = {}
        self.time_s: float | None = None

    def update(self, counters: Counters, generation: int, time_s: float) -> None:
        """Take the newest report of ``generation``; one that is older than what is held is dropped.

        A name that a report lacks keeps its value: the supervisor adds ``cpu_s`` to some reports only.
        """
        held = self._by_generation.get(generation, {})
        if counters.get("slots", 0) < held.get("slots", 0):
            return
        self._by_generation[generation] = {**held, **counters}
        self.time_s = time_s if self.time_s is None else max(self.time_s, time_s)

    @property
    def generation(self) -> int:
        """The newest generation that reported."""
        return max(self._by_generation, default=0)

    @property
    def newest(self) -> Counters:
        """The newest generation's counters."""
        return self._by_generation.get(self.generation, {})

    def totals(self) -> dict[str, float]:
        """Return the sum over generations of every counter (of ``cpu_s`` too; not of states such as ``rss_bytes``)."""
        sums: dict[str, float] = {}
        for counters in self._by_generation.values():
            for name, value in counters.items():
                if name not in _STATES and isinstance(value, (int, float)):
                    sums[name] = sums.get(name, 0) + value
        return sums


_STATES = frozenset({"rss_bytes", "time_ns", "weight_version"})
