"""Whole runs on a tiny environment: counts exact to the unit, order kept, outcome and files as promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from numa_collectors import checkpoint
from tests.trainer.toys import toy_config, toy_trainer

# 700 env steps over 7 environments are 100 slots; (700 - 70) * 2 / 7 = 180 updates.
ENV_STEPS, UPDATES = 700, 180


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spawned"])
def test_env_steps_and_updates_are_exact_with_uneven_shards(tmp_path: Path, inline: bool) -> None:
    result = toy_trainer(tmp_path / "run", inline=inline).run()
    assert (result.status, result.exit_code) == ("finished", 0)
    assert (result.env_steps, result.updates) == (ENV_STEPS, UPDATES)
    assert result.discarded_slots == 0
    loaded = checkpoint.load(tmp_path / "run")
    assert (loaded.progress.env_steps, loaded.progress.updates) == (ENV_STEPS, UPDATES)
    assert loaded.state["learner"]["updates"] == UPDATES
    # The learner itself checked that no slot was lost, repeated or out of order.
    assert loaded.state["learner"]["next_serial"] == [100, 100]
    assert loaded.progress.weight_version == result.weight_version
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (written["status"], written["env_steps"], written["exit_code"]) == ("finished", ENV_STEPS, 0)


def test_a_slow_collector_holds_up_no_other_and_totals_stay_exact(tmp_path: Path) -> None:
    result = toy_trainer(tmp_path / "run", collector={"delay_s": 0.01, "slow_rank": 1}).run()
    assert (result.env_steps, result.updates) == (ENV_STEPS, UPDATES)
    slots = checkpoint.load(tmp_path / "run").progress.collectors
    assert [slots[rank]["slots"] for rank in (0, 1)] == [100, 100]


def test_learner_bound_never_waits_once_started(tmp_path: Path) -> None:
    result = toy_trainer(
        tmp_path / "run",
        utd_mode="learner_bound",
        total_env_steps=210,
        learning_starts=14,
        collector={"delay_s": 0.02},
        learner={"delay_s": 0.001},
    ).run()
    assert result.env_steps == 210
    # Strict would make 56; an environment this slow leaves time for far more.
    assert result.updates > 2 * 56


def test_the_lower_ratio_holds_collectors_back(tmp_path: Path) -> None:
    result = toy_trainer(
        tmp_path / "run", utd_mode="learner_bound", utd_min=2.0, total_env_steps=140, learning_starts=0
    ).run()
    assert result.env_steps == 140
    assert result.updates >= 280


@pytest.mark.parametrize(("low", "high", "per_round"), [(None, 0.25, 9), (2.0, 8.0, 1), (0.5, 0.5, 3)])
def test_two_ratios_hold_back_whoever_leads(tmp_path: Path, low: float | None, high: float, per_round: int) -> None:
    """A learner that could do more stops at the upper ratio; one that does less is waited for at the lower."""
    result = toy_trainer(
        tmp_path / "run", utd_mode="learner_bound", utd_min=low, utd_max=high, num_updates=per_round, inline=True
    ).run()
    paid = result.env_steps - 70
    if low is None:  # what the last slot would still allow is not owed
        assert high * (paid - 7) - 1 <= result.updates <= high * paid
    else:
        assert result.updates == int(low * paid)


def final_state(run_dir: Path) -> dict[str, Any]:
    return dict(checkpoint.load(run_dir).state["learner"])


def test_inline_is_reproducible_to_the_byte_and_depends_on_the_seed(tmp_path: Path) -> None:
    totals = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        toy_trainer(tmp_path / name, inline=True, seed=seed).run()
        totals.append(final_state(tmp_path / name)["total"])
    assert torch.equal(totals[0], totals[1])
    assert not torch.equal(totals[0], totals[2])


def test_another_number_of_collectors_does_not_change_collector_0(tmp_path: Path) -> None:
    """Collector 0 draws from the run's own seed; what the others draw does not touch it."""
    from numa_collectors.collector import CollectorContext

    seeds = [
        CollectorContext.for_rank(0, num_collectors=n, total_num_envs=8, run_seed=5).env_seeds()[:2] for n in (1, 2, 4)
    ]
    assert seeds[0] == seeds[1] == seeds[2]


def test_the_same_scalars_go_to_tensorboard_and_to_jsonl(tmp_path: Path) -> None:
    toy_trainer(tmp_path / "run", collector={"delay_s": 0.01}).run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    for tag in ("perf/env_steps_per_s", "perf/updates_per_s", "perf/learn_pct", "async/utd", "rollout/mean_return"):
        assert tag in tags, tag
    for rank in (0, 1):
        assert {f"async/policy_lag/collector_{rank}", f"async/ring_fill/collector_{rank}"} <= tags
        assert f"placement/pages_on_node/collector_{rank}" in tags
    by_step = {line["step"]: line for line in lines}
    for event in events.Scalars("perf/env_steps_per_s"):
        assert by_step[event.step]["perf/env_steps_per_s"] == pytest.approx(event.value, rel=1e-5)
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == ENV_STEPS


def test_placement_is_read_back_and_written_down(tmp_path: Path) -> None:
    toy_trainer(tmp_path / "run").run()
    reports = json.loads((tmp_path / "run" / "placement.json").read_text())
    assert set(reports) == {"collector[0]", "collector[1]", "learner[0]"}
    for rank in (0, 1):
        report = reports[f"collector[{rank}]"]
        assert report["verified"] is True
        assert report["cpus"] == report["requested"]["cpus"]
        assert report["pages_on_node"] >= 0.98 * report["pages_total"] > 0


def test_a_custom_sink_gets_every_point(tmp_path: Path) -> None:
    class Sink:
        def __init__(self) -> None:
            self.points: list[tuple[int, dict[str, float]]] = []
            self.closed = False

        def write(self, scalars: Any, step: int, wall_time: float) -> None:
            self.points.append((step, dict(scalars)))

        def close(self) -> None:
            self.closed = True

    sink = Sink()
    toy_trainer(tmp_path / "run", inline=True, sinks=[sink]).run()
    assert sink.closed
    assert sink.points[-1][0] == ENV_STEPS


def test_explain_says_everything_and_starts_nothing(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path / "run")
    text = trainer.explain()
    for words in ("placement", "shared memory", "seeds", "risks", "4/3", "collector[1]", "100 slots each"):
        assert words in text
    assert not (tmp_path / "run").exists()


def test_a_run_directory_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    from numa_collectors.errors import ConfigError

    toy_trainer(tmp_path / "run", inline=True).run()
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ConfigError, match="another run"):
        toy_trainer(tmp_path / "run", inline=True).run()
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_one_collector_runs_unbound_as_without_the_library(tmp_path: Path) -> None:
    trainer = toy_trainer(tmp_path / "run", num_collectors=1)
    assert not trainer.setup.placement.bound
    result = trainer.run()
    assert (result.env_steps, result.updates) == (ENV_STEPS, UPDATES)
    assert toy_config(tmp_path).num_collectors == 2
