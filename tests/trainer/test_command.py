"""``python -m numa_collectors.train``: sources of settings together, what it prints, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from numa_collectors.config import json_schema
from numa_collectors.train import main
from tests.trainer.test_refusals import BASE


def test_the_schema_is_exported_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json_schema()


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_file_environment_and_command_line_end_in_one_quiet_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    settings = dict(text.split("=", 1) for text in BASE) | {"inline": True, "num_envs": 4, "total_env_steps": 40}
    path = tmp_path / f"run.{suffix}"
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
    monkeypatch.setenv("NUMA_COLLECTORS_NUM_ENVS", "6")
    monkeypatch.setenv("NUMA_COLLECTORS_SEED", "5")
    run_dir = tmp_path / "run"
    assert main(["--config", str(path), "--quiet", "seed=7", f"run_dir={run_dir}"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["num_envs"], config["seed"], config["total_env_steps"]) == (6, 7, 40)
    assert json.loads((run_dir / "result.json").read_text())["env_steps"] == 42


def test_explain_says_the_plan_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--explain", "num_collectors=2", "oversubscribe=true", f"run_dir={tmp_path / 'run'}"]) == 0
    assert "collector[1]" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
