"""What is wrong is said before anything starts: no process, no file, no directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from numa_collectors.collector import GymCollector, gym_schema
from numa_collectors.errors import ConfigError, NumaCollectorsError, PlacementError
from numa_collectors.rings import Field, Schema
from numa_collectors.snapshots import TensorSpec, WeightSpec
from numa_collectors.trainer import FanOutTrainer, RunFailedError
from tests.collector.envs import Constant, Counter
from tests.trainer.toys import SCHEMA, WEIGHTS, CountingLearner, make_collector, make_learner, toy_config, toy_trainer


def trainer(tmp_path: Path, **changes: Any) -> FanOutTrainer:
    parts: dict[str, Any] = {
        "collector": make_collector(),
        "learner": make_learner(),
        "schema": SCHEMA,
        "weights": WEIGHTS,
    }
    config = {name: value for name, value in changes.items() if name not in parts}
    parts.update({name: value for name, value in changes.items() if name in parts})
    return FanOutTrainer(toy_config(tmp_path / "run", **config), **parts)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"numa_nodes": [4095]}, PlacementError, "4095"),
        ({"cpus_per_collector": 10_000}, PlacementError, "10000"),
        ({"num_collectors": 7, "cpus_per_collector": 500}, PlacementError, "allowed"),
        ({"learner_device": "cuda:97"}, ConfigError, "cuda"),
        ({"collector_inference_device": "cuda:97"}, ConfigError, "cuda"),
        ({"collector": lambda ctx: None}, ConfigError, "picklable"),
        ({"learner": lambda ctx: None}, ConfigError, "picklable"),
        ({"schema": ["obs"]}, ConfigError, "Schema"),
        ({"resume": "/nowhere/at/all"}, NumaCollectorsError, "nowhere"),
    ],
)
def test_refused_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        trainer(tmp_path, **changes)
    assert "Traceback" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_more_memory_than_there_is_leaves_no_run_directory(tmp_path: Path) -> None:
    huge = Schema([Field("obs", "float32", (1 << 22,))])
    with pytest.raises(MemoryError, match=r"GiB|GB|bytes"):
        trainer(tmp_path, schema=huge, ring_capacity=1 << 16, num_envs=64).run()
    assert not (tmp_path / "run").exists()


def test_a_schema_that_the_collector_does_not_write_is_named(tmp_path: Path) -> None:
    other = Schema([*SCHEMA.fields, Field("forgotten", "float32")])
    with pytest.raises(RunFailedError, match="forgotten"):
        trainer(tmp_path, schema=other).run()


def test_a_factory_that_returns_no_collector_is_named(tmp_path: Path) -> None:
    with pytest.raises(NumaCollectorsError, match="Collector"):
        trainer(tmp_path, collector=partial(dict)).run()


def test_weights_that_the_learner_does_not_have_are_named(tmp_path: Path) -> None:
    with pytest.raises(NumaCollectorsError, match="extra"):
        trainer(tmp_path, weights=WeightSpec([*WEIGHTS.tensors, TensorSpec("extra", "float32", (2,))])).run()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir"):
        toy_trainer(tmp_path / "file" / "run", inline=True).run()


class Reshaping(CountingLearner):
    """Its weights have another shape from the third update on."""

    def weights(self) -> dict[str, torch.Tensor]:
        weights = super().weights()
        return weights if self.updates < 3 else {**weights, "w": torch.zeros(5)}


def test_weights_that_change_their_shape_end_the_run_and_leave_the_collectors_the_old_ones(tmp_path: Path) -> None:
    words = r"weight 'w': expected torch.float32 \(4,\), got torch.float32 \(5,\).* must not change during a run"
    with pytest.raises(RunFailedError, match=words) as caught:
        trainer(tmp_path, learner=partial(Reshaping), inline=True, num_updates=1).run()
    assert caught.value.result is not None
    assert caught.value.result.status == "failed"
    # The versions of before: the first, and those of two updates.
    assert caught.value.result.weight_version == 3


class NotANumber(Constant):
    def act(self, obs: Any) -> Any:
        return super().act(obs) * float("nan")


class Sink:
    """A learner that only counts, whatever the fields are."""

    def __init__(self, ctx: Any) -> None:
        self.ingested = 0

    def ingest(self, rank: int, batch: Any) -> None:
        self.ingested += batch["reward"].numel()

    def update(self, num_updates: int) -> dict[str, float]:
        return {}

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": torch.zeros(1)}

    def state_dict(self) -> dict[str, Any]:
        return {"ingested": self.ingested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ingested = state["ingested"]


def gym_run(tmp_path: Path, fault: str | None, policy: Any = Constant, **changes: Any) -> FanOutTrainer:
    return trainer(
        tmp_path,
        collector=partial(GymCollector, make_env=partial(Counter, fault=fault), make_policy=policy),
        learner=partial(Sink),
        schema=gym_schema(Counter).schema,
        weights=WeightSpec([TensorSpec("w", "float32", (1,))]),
        num_envs=4,
        total_env_steps=40,
        learning_starts=0,
        **{"inline": True, **changes},
    )


@pytest.mark.parametrize(
    ("fault", "policy", "words", "env_steps"),
    [
        ("reset", Constant, r"collector\[0\], environment 0 .*RuntimeError in reset\(\): cannot reset", 0),
        ("step", Constant, r"collector\[0\], environment 0 .*RuntimeError in step\(\): cannot step", 8),
        ("shape", Constant, r"environment 0 .*step\(\) gave shape \(3,\), expected \(2,\)", 8),
        ("nan_obs", Constant, r"environment 0 .*step 2, field 'next_obs': expected finite values, got nan", 8),
        (None, NotANumber, r"environment 0 .*step 0, field 'action': the policy gave nan", 0),
    ],
)
def test_what_an_environment_or_a_policy_does_wrong_names_it_and_never_reaches_the_learner(
    tmp_path: Path, fault: str | None, policy: Any, words: str, env_steps: int
) -> None:
    with pytest.raises(RunFailedError, match=words) as caught:
        gym_run(tmp_path, fault, policy).run()
    assert caught.value.result is not None
    assert caught.value.result.env_steps == env_steps


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spawned"])
def test_an_environment_that_raises_at_close_does_not_undo_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], inline: bool
) -> None:
    result = gym_run(tmp_path, "close", inline=inline, console="plain").run()
    assert (result.status, result.env_steps, result.exit_code) == ("finished", 40, 0)
    assert result.checkpoint is not None
    assert "environment 0 (row 0 of its 2): the environment raised RuntimeError in close()" in capsys.readouterr().out
