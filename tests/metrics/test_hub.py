"""The hub: exact tags, rates from differences, restarts, weighting, no number from a time base that is not there."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from numa_collectors.metrics import (
    LagHistogram,
    MetricsHub,
    Sink,
    TensorBoardSink,
    lag_stats,
    metrics_markdown,
    tags_of,
)
from numa_collectors.metrics.names import TABLE

MS = 1_000_000
S = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ListSink:
    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.closed = 0

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        assert wall_time > 1e9
        self.points.append((step, dict(scalars)))

    def close(self) -> None:
        self.closed += 1


def collector_counters(slots: int, *, num_envs: int = 4, **more: float) -> dict[str, Any]:
    stages = {"env_step_ns": 6 * MS, "act_ns": 2 * MS, "push_ns": 1 * MS, "sync_ns": MS // 2}
    return {
        "slots": slots,
        "env_steps": slots * num_envs,
        "episodes": slots // 10,
        "return_sum": 2.0 * (slots // 10),
        "length_sum": 30 * (slots // 10),
        "collect_ns": slots * 10 * MS,
        "wait_space_ns": slots * 5 * MS,
        "cpu_s": slots * 0.01,
        "rss_bytes": 50_000_000,
        "weight_version": 3,
        **{name: value * slots for name, value in stages.items()},
        **more,
    }


def learner_counters(env_steps: int, updates: int, ranks: int, **more: Any) -> dict[str, Any]:
    return {
        "env_steps": env_steps,
        "updates": updates,
        "busy_ns": updates * 5 * MS,
        "ingest_ns": updates * MS,
        "publish_ns": updates * MS // 2,
        "wait_data_ns": updates * 2 * MS,
        "publishes": updates,
        "publish_skips": updates // 10,
        "bytes_ingested": updates * 2_000_000,
        "weight_version": updates,
        "ring_fill": {rank: 0.25 + rank / 4 for rank in range(ranks)},
        "lag": {rank: {1: updates, 3: updates} for rank in range(ranks)},
        "cpu_s": updates * 0.005,
        "rss_bytes": 80_000_000,
        **more,
    }


def run_two_points(num_collectors: int, *sinks: Sink) -> tuple[dict[str, float], ListSink]:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(num_collectors, [sink, *sinks], target_env_steps=10_000, clock=clock)
    hub.update_learner(learner_counters(0, 0, num_collectors))
    for number in (1, 2):
        clock.now += 10
        for rank in range(num_collectors):
            hub.update_collector(rank, collector_counters(100 * (rank + 1) * number))
        hub.update_learner(learner_counters(400 * num_collectors * number, 100 * number, num_collectors))
        point = hub.log()
        assert point is not None
    return dict(point.scalars), sink


GOLDEN_ONE = [
    "async/policy_lag",
    "async/ring_fill",
    "async/utd",
    "async/weight_version",
    "perf/collect_ms_per_batch",
    "perf/collector_act_ms",
    "perf/collector_env_step_ms",
    "perf/collector_push_ms",
    "perf/collector_sync_ms",
    "perf/env_steps_per_s",
    "perf/learn_pct",
    "perf/updates_per_s",
    "rollout/mean_ep_len",
    "rollout/mean_return",
]
GOLDEN_EXTRA = [
    "lag/max",
    "lag/min",
    "lag/p95",
    "transport/ingest_gb_per_s",
    "transport/ingest_pct",
    "transport/publish_ms",
    "transport/publish_pct",
    "transport/publish_skips",
    "wait/data_pct",
    "wait/space_pct",
]
GOLDEN_EACH = [
    "async/policy_lag",
    "async/ring_fill",
    "lag/max",
    "lag/min",
    "lag/p95",
    "perf/act_ms",
    "perf/env_step_ms",
    "perf/env_steps_per_s",
    "perf/push_ms",
    "perf/sync_ms",
    "wait/space_pct",
]


def system_tags(num_collectors: int) -> list[str]:
    workers = ["learner", *(f"collector_{rank}" for rank in range(num_collectors))]
    return [f"system/{kind}/{worker}" for kind in ("cpu_pct", "rss_mb") for worker in workers]


def test_golden_tags_of_one_collector() -> None:
    scalars, _ = run_two_points(1)
    assert sorted(scalars) == sorted(GOLDEN_ONE + GOLDEN_EXTRA + system_tags(1))
    assert [tag for tag in sorted(scalars) if tag.startswith(("perf/", "async/", "rollout/"))] == GOLDEN_ONE


def test_golden_tags_of_three_collectors() -> None:
    scalars, _ = run_two_points(3)
    each = [f"{tag}/collector_{rank}" for tag in GOLDEN_EACH for rank in range(3)]
    assert sorted(scalars) == sorted(GOLDEN_ONE + GOLDEN_EXTRA + each + system_tags(3))


@pytest.mark.parametrize("num_collectors", [1, 3])
def test_the_golden_tags_are_what_tensorboard_reads_back(tmp_path: Path, num_collectors: int) -> None:
    sink = TensorBoardSink(tmp_path)
    scalars, _ = run_two_points(num_collectors, sink)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    each = [f"{tag}/collector_{rank}" for tag in GOLDEN_EACH for rank in range(num_collectors)]
    expected = GOLDEN_ONE + GOLDEN_EXTRA + system_tags(num_collectors) + (each if num_collectors > 1 else [])
    assert sorted(events.Tags()["scalars"]) == sorted(expected)
    for tag, value in scalars.items():
        last = events.Scalars(tag)[-1]
        assert (last.step, last.value) == (800 * num_collectors, pytest.approx(value, rel=1e-6))


@pytest.mark.parametrize("num_collectors", [1, 3])
def test_the_table_lists_exactly_what_is_written(num_collectors: int) -> None:
    scalars, _ = run_two_points(num_collectors)
    assert [tag for tag in sorted(scalars) if not tag.startswith("system/")] == tags_of(num_collectors)


def test_values_of_one_collector() -> None:
    scalars, sink = run_two_points(1)
    assert [step for step, _ in sink.points] == [400, 800]
    assert sink.points[1][1] == scalars
    expected = {
        "perf/env_steps_per_s": 40.0,
        "perf/updates_per_s": 10.0,
        "perf/learn_pct": 5.0,
        "perf/collect_ms_per_batch": 10.0,
        "perf/collector_env_step_ms": 6.0,
        "perf/collector_sync_ms": 0.5,
        "async/policy_lag": 2.0,
        "async/ring_fill": 0.25,
        "async/weight_version": 200,
        "async/utd": 0.25,
        "rollout/mean_return": 2.0,
        "rollout/mean_ep_len": 30.0,
        "lag/min": 1,
        "lag/max": 3,
        "wait/data_pct": 2.0,
        "wait/space_pct": 5.0,
        "transport/ingest_gb_per_s": 2.0,
        "transport/publish_ms": 0.5,
        "transport/publish_skips": 10,
        "system/cpu_pct/collector_0": 10.0,
        "system/rss_mb/learner": 80.0,
    }
    assert {tag: scalars[tag] for tag in expected} == pytest.approx(expected)


def test_values_of_three_collectors_aggregate() -> None:
    scalars, _ = run_two_points(3)
    assert scalars["perf/env_steps_per_s"] == pytest.approx(40 + 80 + 120)
    assert [scalars[f"perf/env_steps_per_s/collector_{rank}"] for rank in range(3)] == pytest.approx([40, 80, 120])
    assert scalars["async/ring_fill"] == pytest.approx(0.5)
    assert scalars["wait/space_pct"] == pytest.approx(10.0)


def test_returns_are_weighted_by_episodes() -> None:
    clock = Clock()
    hub = MetricsHub(2, clock=clock)
    hub.update_learner(learner_counters(0, 0, 2))
    clock.now += 1
    hub.update_collector(0, {"slots": 10, "episodes": 1, "return_sum": 100.0, "length_sum": 10})
    hub.update_collector(1, {"slots": 10, "episodes": 9, "return_sum": 0.0, "length_sum": 90})
    scalars = hub.point().scalars
    assert scalars["rollout/mean_return"] == pytest.approx(10.0)
    assert scalars["rollout/mean_ep_len"] == pytest.approx(10.0)


def test_no_episode_in_the_interval_gives_no_return() -> None:
    clock = Clock()
    hub = MetricsHub(1, clock=clock)
    hub.update_collector(0, {"slots": 10, "episodes": 0, "return_sum": 0.0, "length_sum": 0})
    assert not [tag for tag in hub.point().scalars if tag.startswith("rollout/")]


def test_a_restarted_collector_keeps_totals_exact() -> None:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    hub.update_learner(learner_counters(0, 0, 1))
    clock.now += 10
    hub.update_collector(0, collector_counters(100), generation=0)
    hub.update_learner(learner_counters(400, 10, 1))
    assert hub.log() is not None
    clock.now += 5
    hub.update_collector(0, collector_counters(120), generation=0)
    clock.now += 5
    hub.update_collector(0, collector_counters(30), generation=1)
    hub.update_collector(0, collector_counters(110), generation=0)  # late, and older than what is held: dropped
    hub.update_learner(learner_counters(600, 20, 1))
    point = hub.log()
    assert point is not None
    assert hub.totals()["slots"] == hub.collector_totals(0)["slots"] == 150
    assert hub.totals()["env_steps"] == 600
    assert point.scalars["perf/env_steps_per_s"] == pytest.approx(20.0)
    assert point.collectors[0].generation == 1
    assert point.scalars["system/cpu_pct/collector_0"] > 0


def test_no_rate_from_a_missing_time_base_nor_from_history() -> None:
    """A resumed learner's first report holds the whole history; the first rates are of what came after it."""
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    assert hub.log() is None
    hub.update_learner(learner_counters(1_000_000, 500_000, 1))
    assert hub.log() is None
    assert "perf/updates_per_s" not in hub.point().scalars
    clock.now += 2
    hub.update_learner(learner_counters(1_000_100, 500_020, 1))
    point = hub.log()
    assert point is not None
    assert point.scalars["perf/updates_per_s"] == pytest.approx(10.0)
    assert all(math.isfinite(value) for value in point.scalars.values())


def test_rates_do_not_depend_on_when_reports_arrive() -> None:
    """Reports every 3 s, points every 2 s: a rate over the log interval would alternate between 0 and double."""
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    hub.update_learner(learner_counters(0, 0, 1))
    for second in range(1, 31):
        clock.now += 1
        if second % 3 == 0:
            hub.update_learner(learner_counters(40 * second, 10 * second, 1))
            hub.update_collector(0, collector_counters(10 * second))
        if second % 2 == 0:
            hub.log()
    rates = [scalars["perf/updates_per_s"] for _, scalars in sink.points]
    assert len(rates) >= 9
    assert rates == pytest.approx([10.0] * len(rates))
    assert [scalars["perf/env_steps_per_s"] for _, scalars in sink.points] == pytest.approx([40.0] * len(rates))


def test_reports_may_bring_their_own_time() -> None:
    hub = MetricsHub(1, clock=Clock())
    hub.update_learner(learner_counters(0, 0, 1, time_ns=5 * S))
    hub.update_learner(learner_counters(40, 10, 1, time_ns=7 * S))
    assert hub.point().scalars["perf/updates_per_s"] == pytest.approx(5.0)


def test_each_point_has_its_own_step() -> None:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    for env_steps, updates in [(0, 0), (100, 1), (100, 2), (100, 3), (200, 4), (150, 2), (300, 5)]:
        hub.update_learner(learner_counters(env_steps, updates, 1))
        hub.log()
        clock.now += 1
    steps = [step for step, _ in sink.points]
    assert steps == [100, 200, 300]
    assert sink.points[1][1]["perf/updates_per_s"] == pytest.approx(1.0)


def test_a_restarted_learner_sets_a_new_base() -> None:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    hub.update_learner(learner_counters(0, 0, 1))
    clock.now += 10
    hub.update_learner(learner_counters(1000, 100, 1))
    hub.log()
    clock.now += 10
    hub.update_learner(learner_counters(900, 90, 1, busy_ns=0), generation=1)
    assert hub.log() is None
    clock.now += 10
    hub.update_learner(learner_counters(1100, 110, 1, busy_ns=2 * S), generation=1)
    point = hub.log()
    assert point is not None
    assert point.scalars["perf/updates_per_s"] == pytest.approx(2.0)
    assert point.scalars["perf/learn_pct"] == pytest.approx(20.0)


def test_a_silent_collector_shows_as_zero() -> None:
    clock = Clock()
    hub = MetricsHub(2, [], clock=clock)
    hub.update_learner(learner_counters(0, 0, 2))
    clock.now += 10
    hub.update_collector(0, collector_counters(100))
    hub.update_collector(1, collector_counters(100))
    hub.update_learner(learner_counters(800, 10, 2))
    hub.log()
    clock.now += 10
    hub.update_collector(0, collector_counters(200))
    hub.update_learner(learner_counters(1200, 20, 2))
    scalars = hub.point().scalars
    assert scalars["perf/env_steps_per_s/collector_1"] == 0.0
    assert scalars["perf/env_steps_per_s"] == pytest.approx(40.0)


def test_lag_is_of_the_data_taken_in_since_the_last_point() -> None:
    clock = Clock()
    hub = MetricsHub(1, clock=clock)
    histogram = LagHistogram()
    histogram.record(5, [5, 5])
    hub.update_learner(learner_counters(0, 0, 1, lag={0: histogram.counts()}))
    clock.now += 1
    histogram.record(10, [8] * 95 + [2] * 5)
    hub.update_learner(learner_counters(100, 1, 1, lag={0: histogram.counts()}))
    scalars = hub.point().scalars
    assert (scalars["lag/min"], scalars["lag/p95"], scalars["lag/max"]) == (2, 2, 8)
    assert scalars["async/policy_lag"] == pytest.approx(2.3)


def test_lag_statistics() -> None:
    assert lag_stats({}) is None
    assert lag_stats({4: 0}) is None
    stats = lag_stats({0: 94, 7: 6})
    assert stats is not None
    assert (stats.min, stats.p95, stats.max) == (0, 7, 7)
    histogram = LagHistogram()
    histogram.record(3, [9])
    histogram.record(10**9, range(0, 5000, 7))
    histogram.record(10**9, [10**9 - 2**40])
    assert set(histogram.counts()) == {0, 2**29, 2**40}


def test_placement_tags() -> None:
    hub = MetricsHub(2, clock=Clock())
    hub.update_placement("collector_0", 63, 64, text="node 0, CPUs 0-3")
    hub.update_placement("collector_1", None, None)
    hub.update_placement("learner", 10, 10, drift=2)
    point = hub.point()
    tags = {tag: value for tag, value in point.scalars.items() if tag.startswith("placement/")}
    assert tags == {
        "placement/pages_on_node/collector_0": 63 / 64,
        "placement/drift/collector_0": 0,
        "placement/pages_on_node/learner": 1.0,
        "placement/drift/learner": 2,
    }
    assert [view.placement for view in point.collectors] == ["node 0, CPUs 0-3", ""]


def test_processor_time_is_of_the_interval_also_when_few_reports_have_it() -> None:
    """A process has used seconds before its first report, and only the reports at a log point bring ``cpu_s``."""
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    hub.update_learner({"env_steps": 0})
    for second, generation in ((1, 0), (2, 0), (3, 1), (4, 1)):
        clock.now += 1
        slots, cpu_s = 10 * (second if generation == 0 else second - 2), 5.0 + 0.5 * second
        for report in ({"slots": slots, "cpu_s": cpu_s}, {"slots": slots}):
            hub.update_collector(0, report, generation)
        for report in ({"env_steps": second, "cpu_s": cpu_s}, {"env_steps": second}):
            hub.update_learner(report)
        hub.log()
    values = [
        [scalars.get(f"system/cpu_pct/{name}") for _, scalars in sink.points] for name in ("collector_0", "learner")
    ]
    assert values[0] == [None, pytest.approx(50.0), pytest.approx(650.0), pytest.approx(50.0)]
    assert values[1] == [None, pytest.approx(50.0), pytest.approx(50.0), pytest.approx(50.0)]


def test_train_metrics_pass_through() -> None:
    hub = MetricsHub(1, clock=Clock())
    hub.update_learner(learner_counters(1, 1, 1, train={"qf_loss": 0.5}))
    assert hub.point().scalars["train/qf_loss"] == 0.5


def test_progress_and_remaining_time() -> None:
    clock = Clock()
    hub = MetricsHub(1, target_env_steps=2000, clock=clock)
    assert hub.point().eta_s is None
    hub.update_learner(learner_counters(1000, 0, 1))  # resumed: the past says nothing of this run's pace
    clock.now += 10
    hub.update_learner(learner_counters(1100, 10, 1))
    point = hub.point()
    assert (point.step, point.updates, point.target_env_steps) == (1100, 10, 2000)
    assert point.eta_s == pytest.approx(90.0)
    assert point.elapsed_s == pytest.approx(10.0)


def test_a_window_of_its_own_does_not_disturb_the_log() -> None:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(1, [sink], clock=clock)
    hub.update_learner(learner_counters(0, 0, 1))
    clock.now += 8
    hub.update_learner(learner_counters(80, 80, 1))
    window = hub.window()
    clock.now += 2
    hub.update_learner(learner_counters(100, 100, 1))
    assert hub.point(window).scalars["perf/updates_per_s"] == pytest.approx(10.0)
    point = hub.log()
    assert point is not None
    assert point.scalars["perf/updates_per_s"] == pytest.approx(10.0)


def test_a_failing_sink_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Full(ListSink):
        def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
            raise OSError(28, "No space left on device")

    clock, good, bad = Clock(), ListSink(), Full()
    hub = MetricsHub(1, [bad, good], clock=clock)
    with caplog.at_level(logging.ERROR):
        for env_steps in range(0, 400, 100):
            hub.update_learner(learner_counters(env_steps, env_steps, 1))
            hub.log()
            clock.now += 1
    assert len(good.points) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "Full failed and gets no further metrics; the run goes on"
    ]
    assert "No space left" in caplog.text
    hub.close()
    hub.close()
    assert good.closed == 1


def test_markdown_has_each_tag() -> None:
    text = metrics_markdown()
    for metric in TABLE:
        assert f"\n| `{metric.tag}` |" in text


def test_sums_of_a_collector_are_logged_as_means_over_the_slots_of_the_interval() -> None:
    clock, sink = Clock(), ListSink()
    hub = MetricsHub(2, [sink], clock=clock)
    hub.update_learner(learner_counters(0, 0, 2))
    for number in (1, 2):
        clock.now += 10
        # 100 slots an interval with 3 each, and 300 with 7 each: 6 on average; a tag may end like a stage.
        hub.update_collector(0, collector_counters(100 * number, **{"sum:reward/upright_ns": 300.0 * number}))
        hub.update_collector(1, collector_counters(300 * number, **{"sum:reward/upright_ns": 2100.0 * number}))
        hub.update_learner(learner_counters(1600 * number, 100 * number, 2))
        hub.log()
    assert [scalars["reward/upright_ns"] for _, scalars in sink.points] == [6.0, 6.0]
    assert not [tag for tag in sink.points[-1][1] if "sum:" in tag]


def test_a_wait_longer_than_the_interval_is_no_more_than_all_of_it() -> None:
    clock = Clock()
    hub = MetricsHub(1, clock=clock)
    hub.update_learner(learner_counters(0, 0, 1))
    clock.now += 10
    # Counted at its end, and begun before the workers were ready.
    hub.update_collector(0, collector_counters(1, wait_space_ns=25 * S))
    assert hub.point().scalars["wait/space_pct"] == 100.0
