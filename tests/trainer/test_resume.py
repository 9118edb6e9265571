"""A checkpoint continues a run: counts go on, versions rise, contradictions are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from numa_collectors import checkpoint
from numa_collectors.errors import CheckpointError
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.trainer import FanOutTrainer
from tests.trainer.toys import SCHEMA, make_collector, make_learner, toy_config, toy_trainer


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spawned"])
def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path, inline: bool) -> None:
    first = toy_trainer(tmp_path / "run", inline=inline).run()
    second = toy_trainer(tmp_path / "run", inline=inline, resume="latest", total_env_steps=1400).run()
    assert (second.status, second.env_steps) == ("finished", 1400)
    # The buffer begins empty, so learning_starts gates again, and no burst of updates pays for it: 180 + 180, not 380.
    assert second.updates == first.updates + 180
    assert second.weight_version > first.weight_version
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.state["learner"]["updates"] == second.updates
    # Collectors of a resumed run have fresh seeds.
    assert {counters["generation"] for counters in loaded.progress.collectors.values()} == {1}


def test_another_number_of_collectors_on_resume(tmp_path: Path) -> None:
    toy_trainer(tmp_path / "run").run()
    result = toy_trainer(
        tmp_path / "run", num_collectors=3, oversubscribe=True, resume="latest", total_env_steps=1400
    ).run()
    assert (result.status, result.env_steps) == ("finished", 1400)


def test_a_complete_run_is_not_rewritten(tmp_path: Path) -> None:
    toy_trainer(tmp_path / "run", inline=True).run()
    with pytest.raises(CheckpointError, match="complete"):
        toy_trainer(tmp_path / "run", inline=True, resume="latest")


def test_weights_that_contradict_the_checkpoint_are_a_named_error(tmp_path: Path) -> None:
    toy_trainer(tmp_path / "run", inline=True).run()
    with pytest.raises(CheckpointError, match="weights"):
        FanOutTrainer(
            toy_config(tmp_path / "run", inline=True, resume="latest", total_env_steps=1400),
            collector=make_collector(),
            learner=make_learner(),
            schema=SCHEMA,
            weights=WeightSpec([TensorSpec("w", "float32", (5,)), TensorSpec("count", "int64", ())]),
        )


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    toy_trainer(
        tmp_path / "run", inline=True, collector={"delay_s": 0.005}, checkpoint_interval_s=0.1, keep_checkpoints=2
    ).run()
    assert len(checkpoint.checkpoints(tmp_path / "run")) == 2
