"""Every tag that a run writes: one table, from which the documentation page is generated."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STAGES", "TABLE", "Metric", "collector_tag", "metrics_markdown", "tags_of"]

STAGES: tuple[str, ...] = ("env_step", "act", "push", "sync")
"""Stages that every collector times; a collector may add its own with ``ctx.timer``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One tag.  ``<stage>``, ``<worker>`` and ``<name>`` stand for a stage, a worker and what the learner returned.

    ``each`` is the tag under which, with several collectors, each of them adds its own (``<i>``), or None.
    """

    tag: str
    unit: str
    meaning: str
    each: str | None = None


def _each(tag: str) -> str:
    return f"{tag}/collector_<i>"


TABLE: tuple[Metric, ...] = (
    Metric(
        "perf/env_steps_per_s", "1/s", "environment steps committed by the collectors", _each("perf/env_steps_per_s")
    ),
    Metric("perf/updates_per_s", "1/s", "updates of the learner"),
    Metric("perf/learn_pct", "%", "share of the learner's time spent in updates"),
    Metric(
        "perf/collect_ms_per_batch", "ms", "time of one slot: one step of all environments of a collector, with acting"
    ),
    Metric(
        "perf/collector_<stage>_ms",
        "ms",
        "time of one stage for one slot, weighted by slots over the collectors",
        "perf/<stage>_ms/collector_<i>",
    ),
    Metric(
        "async/policy_lag",
        "versions",
        "how many versions older than the learner's the acting weights were, when the learner took the data; mean",
        _each("async/policy_lag"),
    ),
    Metric(
        "async/ring_fill",
        "0 to 1",
        "slots that wait for the learner over those by which a collector may lead; mean",
        _each("async/ring_fill"),
    ),
    Metric("async/weight_version", "versions", "newest version published"),
    Metric("async/utd", "updates/step", "updates done for each environment step taken in, over the whole run"),
    Metric("rollout/mean_return", "reward", "mean return of the episodes that ended, each episode counting once"),
    Metric("rollout/mean_ep_len", "steps", "mean length of the episodes that ended"),
    Metric("lag/min", "versions", "least policy lag of the data taken in", _each("lag/min")),
    Metric("lag/p95", "versions", "95 % of the data taken in had at most this policy lag", _each("lag/p95")),
    Metric("lag/max", "versions", "greatest policy lag of the data taken in", _each("lag/max")),
    Metric("wait/data_pct", "%", "share of the learner's time spent waiting for data"),
    Metric(
        "wait/space_pct", "%", "share of the collectors' time spent waiting for space; mean", _each("wait/space_pct")
    ),
    Metric("transport/ingest_pct", "%", "share of the learner's time spent taking data in"),
    Metric("transport/ingest_gb_per_s", "GB/s", "bytes taken in over the time that it took; 1 GB is 10^9 bytes"),
    Metric("transport/publish_pct", "%", "share of the learner's time spent publishing weights"),
    Metric("transport/publish_ms", "ms", "time of one publication of weights"),
    Metric(
        "transport/publish_skips", "count", "publications put off since an earlier copy was in flight, in the interval"
    ),
    Metric("placement/pages_on_node/<worker>", "0 to 1", "share of the sampled private pages on the worker's node"),
    Metric("placement/drift/<worker>", "count", "bindings found changed since the start"),
    Metric("system/cpu_pct/<worker>", "%", "processor time of the worker; 100 is one CPU"),
    Metric("system/rss_mb/<worker>", "MB", "resident memory of the worker; 1 MB is 10^6 bytes"),
    Metric("train/<name>", "", "what the learner's `update` returned under that name"),
)


def collector_tag(tag: str, rank: int) -> str:
    """Return the tag of collector ``rank`` beside the aggregate ``tag``."""
    return f"{tag}/collector_{rank}"


def tags_of(num_collectors: int, *, stages: tuple[str, ...] = STAGES, prefix: str = "") -> list[str]:
    """Return, sorted, the tags without ``<worker>`` and ``<name>`` that a run of ``num_collectors`` writes."""
    tags: list[str] = []
    for metric in TABLE:
        if "<worker>" in metric.tag or "<name>" in metric.tag:
            continue
        patterns = [metric.tag]
        if metric.each is not None and num_collectors > 1:
            patterns += [metric.each.replace("<i>", str(rank)) for rank in range(num_collectors)]
        for pattern in patterns:
            tags += [pattern.replace("<stage>", stage) for stage in stages] if "<stage>" in pattern else [pattern]
    return sorted(tag for tag in tags if tag.startswith(prefix))


_HEAD = """# Metrics

One TensorBoard writer and one JSONL file (`metrics.jsonl`, always) in the run directory get the same scalars, one
point an interval (`log_interval_s`), at the number of environment steps that the learner has taken in.  Each value is
of the interval since the point before, unless said otherwise.  With several collectors a tag aggregates over them,
and each collector adds its own; under `torchrun` they are those of rank 0.  Reporting takes 0.3 ms of the learner's
time ten times a second, 0.3 % (`python -m benchmarks.metrics_overhead`).  This page is generated from
`numa_collectors.metrics.TABLE`.

| tag | unit | meaning | with several, each |
|---|---|---|---|
"""


def metrics_markdown() -> str:
    """Return the text of ``docs/metrics.md``."""
    rows = [
        f"| `{metric.tag}` | {metric.unit or 'any'} | {metric.meaning} | {f'`{metric.each}`' if metric.each else ''} |"
        for metric in TABLE
    ]
    return _HEAD + "\n".join(rows) + "\n"
