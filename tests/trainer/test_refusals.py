"""Configurations that another trainer takes in silence, clamps, or ends in a traceback or a hang: refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from numa_collectors.train import main
from tests.trainer.collecting import CountingCollector
from tests.trainer.toys import SCHEMA, WEIGHTS, CountingLearner

HERE = "tests.trainer.test_refusals"
BASE = [
    f"collector={HERE}:ToyCollector",
    f"learner={HERE}:ToyLearner",
    "total_env_steps=6400",
    "learner_device=cpu",
    "collector_inference_device=cpu",
]
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA, so asking for it is no error")


class ToyCollector(CountingCollector):
    schema = SCHEMA


class ToyLearner(CountingLearner):
    weight_spec = WEIGHTS


# What is given on the command line, the field that is named, what was got, and a word of the remedy.
REFUSED = [
    (["num_collectors=128"], "num_collectors", "128", "lower num_collectors"),
    (["num_collectors=0"], "num_collectors", "0", "leave it out"),
    (["num_collectors=-1"], "num_collectors", "-1", "leave it out"),
    (["num_collectors=2", "cpus_per_collector=4096"], "", "4096", "fewer CPUs"),
    (["cpus_per_collector=5000"], "", "5000", "fewer CPUs"),
    (["cpus_per_collector=0"], "cpus_per_collector", "0", "leave it out"),
    (["cpus_per_collector=-2"], "cpus_per_collector", "-2", "leave it out"),
    (["numa_nodes=4095"], "numa_nodes", "4095", "topo"),
    (["learner_node=4095"], "learner_node", "4095", "topo"),
    (["collector_cpu_cores=7"], "collector_cpu_cores", "unknown", "did you mean"),
    (["utd_mode=stirct"], "utd_mode", "'stirct'", "did you mean 'strict'?"),
    (["ring_capacity=0"], "ring_capacity", "0", "leave it out"),
    (["weight_publish_interval=0"], "weight_publish_interval", "0", "leave it out"),
    (["max_ingest_per_iter=0"], "max_ingest_per_iter", "0", "leave it out"),
    (["num_updates=0"], "num_updates", "0", "leave it out"),
    (["learning_starts=6400"], "learning_starts", "6400", "lower learning_starts"),
    # Settings of the algorithm are the learner's, and its options to check.
    (["batch_size=0"], "batch_size", "unknown", "known names"),
    (["idle_sleep_s=-1"], "idle_sleep_s", "unknown", "known names"),
    (["restart_backoff_s=-1"], "restart_backoff_s", "-1", "leave it out"),
    (["collector_inference_device=gpu"], "collector_inference_device", "'gpu'", "leave it out"),
    pytest.param(["collector_inference_device=cuda:0"], "", "none", "use 'cpu'", marks=NO_CUDA),
    pytest.param(["learner_device=cuda:0"], "", "none", "use 'cpu'", marks=NO_CUDA),
    (["collector=no_such_task:Collector"], "collector", "'no_such_task:Collector'", "PYTHONPATH"),
    (["learner_options.delay=0"], "learner_options", "'delay'", "correct"),
]


@pytest.mark.parametrize(("arguments", "field", "got", "remedy"), REFUSED)
def test_refused_in_one_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], field: str, got: str, remedy: str
) -> None:
    assert main([*BASE, *arguments, f"run_dir={tmp_path / 'run'}"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {field}")
    assert "expected" in line or "asked" in line
    assert got in line.split("expected" if "expected" in line else "asked", 1)[1]
    assert re.search(rf"[;:.] .*{re.escape(remedy)}", line), line
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []
