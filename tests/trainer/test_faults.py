"""Runs that go on: collectors restarted or left out, learners restarted.  What ends a run is in ``test_disturbances``."""

from __future__ import annotations

from pathlib import Path

import pytest

from numa_collectors import checkpoint
from numa_collectors.trainer import RunFailedError
from tests.trainer.toys import toy_trainer


def test_a_killed_collector_is_restarted_and_the_run_is_exact(tmp_path: Path) -> None:
    result = toy_trainer(
        tmp_path / "run",
        collector={"fault": "kill", "fault_rank": 0, "fault_step": 20},
        on_collector_exit="restart",
        restart_backoff_s=0.0,
    ).run()
    # The half-written slot 20 of generation 0 was never delivered (the learner checks every serial), and written again.
    assert (result.status, result.env_steps, result.updates, result.num_restarts) == ("finished", 700, 180, 1)
    assert checkpoint.load(tmp_path / "run").progress.collectors[0]["generation"] == 1


def test_the_restart_budget_ends(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="planted failure"):
        toy_trainer(
            tmp_path / "run",
            collector={"fault": "raise", "fault_step": 3, "fault_generations": 9},
            on_collector_exit="restart",
            max_restarts=1,
            restart_backoff_s=0.0,
        ).run()


def test_going_on_without_a_collector_still_reaches_the_target(tmp_path: Path) -> None:
    result = toy_trainer(
        tmp_path / "run",
        collector={"fault": "kill", "fault_rank": 0, "fault_step": 20},
        on_collector_exit="continue",
        num_updates=70,
    ).run()
    assert result.status == "finished"
    # Nothing is owed for what is beyond the target: the updates do not depend on who made the data.
    assert result.updates == 70 * (700 - 70) // 7
    slots = checkpoint.load(tmp_path / "run").progress.collectors
    assert slots[0]["slots"] == 20
    # 80 slots of 4 environments are missing: collector 1, with 3, makes 107 more.
    assert slots[1]["slots"] == 100 + 107
    assert result.env_steps == 20 * 4 + 207 * 3


@pytest.mark.parametrize("death", ["kill_at", "fail_at"])
def test_a_learner_that_dies_takes_up_from_its_last_checkpoint(tmp_path: Path, death: str) -> None:
    result = toy_trainer(
        tmp_path / "run",
        collector={"delay_s": 0.02},
        learner={death: 60},
        checkpoint_interval_s=0.2,
        on_learner_exit="restart",
        restart_backoff_s=0.0,
    ).run()
    assert (result.status, result.num_restarts) == ("finished", 1)
    # What the dead learner had ingested after its checkpoint is gone with its memory: the collectors made it again.
    assert result.env_steps >= 700
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.progress.env_steps == result.env_steps
    assert loaded.progress.weight_version == result.weight_version
