"""Sinks: real event files parsed back by TensorBoard itself, JSON lines, and no two runs in one directory."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from numa_collectors.errors import ConfigError
from numa_collectors.metrics import JsonlSink, Sink, TensorBoardSink, check_run_dir


def scalars_of(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_what_tensorboard_reads(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "run")
    sink.write({"perf/learn_pct": 12.5, "async/utd": 0.25}, 100, 1_700_000_000.0)
    sink.write({"perf/learn_pct": 13.5}, 200, 1_700_000_001.5)
    # Read while the file is still open: what was written must be on disk for a live board.
    assert scalars_of(tmp_path / "run") == {"perf/learn_pct": [(100, 12.5), (200, 13.5)], "async/utd": [(100, 0.25)]}
    sink.close()
    sink.close()
    events = list(EventFileLoader(str(sink.path)).Load())
    assert events[0].file_version == "brain.Event:2"
    assert [event.wall_time for event in events[1:]] == [1_700_000_000.0, 1_700_000_001.5]
    assert sink.path.name.startswith("events.out.tfevents.")


def test_events_keep_values_that_are_not_finite(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write({"train/loss": math.nan, "train/max": math.inf}, 1, 1_700_000_000.0)
    sink.close()
    values = scalars_of(tmp_path)
    assert math.isnan(values["train/loss"][0][1])
    assert values["train/max"][0][1] == math.inf


def test_a_resumed_run_drops_the_steps_it_goes_over_again(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path)
    for step in (100, 200, 300):
        first.write({"x": float(step)}, step, 1_700_000_000.0 + step)
    first.close()
    second = TensorBoardSink(tmp_path, resume_step=200)
    second.write({"x": -1.0}, 300, 1_700_001_000.0)
    second.close()
    assert first.path != second.path
    assert scalars_of(tmp_path)["x"] == [(100, 100.0), (200, 200.0), (300, -1.0)]


def test_jsonl_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "a" / "run")
    assert isinstance(sink, Sink)
    sink.write({"x": 1.5, "bad": math.nan, "worse": -math.inf}, 7, 1_700_000_000.0)
    assert lines_of(sink.path) == [{"step": 7, "wall_time": 1_700_000_000.0, "x": 1.5, "bad": None, "worse": None}]
    sink.close()
    sink.close()


def test_jsonl_resume_drops_later_and_torn_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in (100, 200, 300):
        sink.write({"x": float(step)}, step, 1_700_000_000.0)
    sink.close()
    with sink.path.open("a") as file:
        file.write('{"step": 150, "wall_ti')
    resumed = JsonlSink(tmp_path, resume_step=200)
    resumed.write({"x": 0.0}, 250, 1_700_000_001.0)
    resumed.close()
    assert [line["step"] for line in lines_of(resumed.path)] == [100, 200, 250]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("kind", [TensorBoardSink, JsonlSink])
def test_a_directory_of_another_run_is_refused(tmp_path: Path, kind: type[TensorBoardSink] | type[JsonlSink]) -> None:
    kind(tmp_path).close()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        ConfigError, match=r"run_dir: expected one without metrics of another run, got .* resume=latest"
    ):
        kind(tmp_path)
    with pytest.raises(ConfigError):
        check_run_dir(tmp_path)
    assert sorted(os.listdir(tmp_path)) == before
    check_run_dir(tmp_path, resume=True)
    kind(tmp_path, resume_step=0).close()


def test_both_sinks_share_a_new_directory(tmp_path: Path) -> None:
    check_run_dir(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    JsonlSink(tmp_path / "run").close()
    TensorBoardSink(tmp_path / "run").close()


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="expected a directory, got the file"):
        check_run_dir(tmp_path / "run")


LIGHT = """
import sys
for name in ("torch", "numpy", "pydantic", "tensorboard", "rich", "psutil"):
    sys.modules[name] = None
from numa_collectors.metrics import JsonlSink, MetricsHub, make_console, metrics_markdown
hub = MetricsHub(2, [JsonlSink(sys.argv[1])])
hub.update_learner({"env_steps": 0, "time_ns": 1})
hub.update_learner({"env_steps": 8, "time_ns": 10**9})
make_console("plain").update(hub.log())
hub.close()
"""

TENSORBOARD_ONLY = """
import sys
sys.modules["torch"] = sys.modules["tensorflow"] = None
from numa_collectors.metrics import TensorBoardSink
TensorBoardSink(sys.argv[1]).close()
assert not [name for name in sys.modules if name.startswith("tensorflow.")]
"""


@pytest.mark.parametrize("code", [LIGHT, TENSORBOARD_ONLY])
def test_imports_stay_light(tmp_path: Path, code: str) -> None:
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, stdout=subprocess.DEVNULL)
