"""What is wrong is said before anything starts: no process, no file, no directory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from numa_collectors.errors import ConfigError, NumaCollectorsError, PlacementError
from numa_collectors.rings import Field, Schema
from numa_collectors.trainer import FanOutTrainer, RunFailedError
from tests.trainer.toys import SCHEMA, WEIGHTS, make_collector, make_learner, toy_config, toy_trainer


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
    from numa_collectors.snapshots import TensorSpec, WeightSpec

    with pytest.raises(NumaCollectorsError, match="extra"):
        trainer(tmp_path, weights=WeightSpec([*WEIGHTS.tensors, TensorSpec("extra", "float32", (2,))])).run()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="run_dir"):
        toy_trainer(tmp_path / "file" / "run", inline=True).run()
