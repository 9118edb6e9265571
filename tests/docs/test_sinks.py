"""The sinks of docs/integrating.md: real ones get real points; a stand-in records where a service's package is missing."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from numa_collectors.metrics import Sink
from tests.trainer.toys import toy_trainer

from .markdown import ROOT, blocks


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the page's block, run in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks(ROOT / "docs" / "integrating.md") if "class CsvSink" in block.text]
    names: dict[str, Any] = {}
    exec(compile(block.text, block.where, "exec"), names)
    return names


def test_the_csv_sink_gets_every_point_of_a_run(page: dict[str, Any], tmp_path: Path) -> None:
    result = toy_trainer(tmp_path / "run", inline=True, sinks=[page["CsvSink"]("points.csv")]).run()
    with (tmp_path / "points.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert int(rows[-1]["step"]) == result.env_steps
    assert {"async/utd", "perf/learn_pct", "train/loss"} <= {row["tag"] for row in rows}
    assert all(float(row["value"]) >= 0 for row in rows if row["tag"] == "async/utd")


def recorder(calls: list[tuple[str, Any]], *names: str) -> dict[str, Any]:
    def record(name: str) -> Any:
        return lambda *args, **more: calls.append((name, (args, more)))

    return {name: record(name) for name in names}


def test_the_wandb_sink(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, Any]] = []
    if importlib.util.find_spec("wandb") is None:
        run = SimpleNamespace(**recorder(calls, "log", "finish"))
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
    sink = page["WandbSink"](project="p", mode="offline", dir=str(tmp_path))
    use(sink)
    if calls:
        point = {"perf/learn_pct": 5.0, "lag/max/collector_1": 2.0}
        assert calls == [("log", ((point,), {"step": 640})), *[("finish", ((), {}))] * 2]


def test_the_mlflow_sink(page: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, Any]] = []
    if importlib.util.find_spec("mlflow") is None:
        stand_in = SimpleNamespace(**recorder(calls, "set_experiment", "start_run", "log_metrics", "end_run"))
        monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(tmp_path / "mlruns"))
    use(page["MlflowSink"]("e"))
    if calls:
        point = {"perf/learn_pct": 5.0, "lag/max/collector_1": 2.0}
        assert calls[:2] == [("set_experiment", (("e",), {})), ("start_run", ((), {}))]
        assert calls[2:] == [("log_metrics", ((point,), {"step": 640})), *[("end_run", ((), {}))] * 2]


def use(sink: Any) -> None:
    assert isinstance(sink, Sink)
    sink.write({"perf/learn_pct": 5.0, "lag/max/collector_1": 2.0}, 640, 1e9)
    sink.close()
    sink.close()
