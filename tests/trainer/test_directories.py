"""Run directories that are full, read-only or taken: the run says so once, and what was saved stands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from numa_collectors import checkpoint
from numa_collectors.checkpoint import RunLock
from numa_collectors.errors import ConfigError
from numa_collectors.trainer import FanOutTrainer
from tests.trainer.toys import SCHEMA, WEIGHTS, CountingLearner, make_collector, toy_config, toy_trainer


class GrowingLearner(CountingLearner):
    """Its state becomes larger than the disk."""

    def state_dict(self) -> dict[str, Any]:
        ballast = torch.zeros(0 if self.updates < 60 else 1_000_000)
        return {**super().state_dict(), "ballast": ballast}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB; skip where that is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if done is None or done.returncode:
        pytest.skip(f"needs the right to mount a small tmpfs: {done.stderr.strip() if done else 'not root'}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_leaves_the_run_going_and_the_old_checkpoint(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = FanOutTrainer(
        toy_config(small_disk / "run", inline=True, console="plain", checkpoint_interval_s=0.02, tensorboard=False),
        collector=make_collector(delay_s=0.005),
        learner=partial(GrowingLearner),
        schema=SCHEMA,
        weights=WEIGHTS,
    ).run()
    # The target was reached, and could not be saved: that is no success.
    assert (result.status, result.env_steps, result.updates, result.exit_code) == ("finished", 700, 180, 1)
    assert "No space left on device" in (result.error or "")
    loaded = checkpoint.load(small_disk / "run")
    assert loaded.path == result.checkpoint
    assert 0 < loaded.progress.updates < 60
    assert capsys.readouterr().out.count("expected to write a checkpoint") == 1
    assert not [path for path in (small_disk / "run").rglob("*") if path.name.startswith(".saving")]


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spawned"])
def test_a_read_only_run_directory_is_named_before_anything_starts(small_disk: Path, inline: bool) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match=r"run_dir: .*Read-only file system"):
        toy_trainer(small_disk / "run", inline=inline).run()


def test_a_disk_without_room_for_anything_is_named_before_anything_starts(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    with pytest.raises(OSError, match="No space left"):
        _fill(small_disk / "ballast")
    with pytest.raises(ConfigError, match=r"run_dir: .*No space left on device"):
        toy_trainer(small_disk / "run", inline=True).run()


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "spawned"])
def test_a_run_directory_in_use_names_the_process_that_has_it(tmp_path: Path, inline: bool) -> None:
    with RunLock(tmp_path / "run"), pytest.raises(ConfigError, match=f"held by process {os.getpid()}"):
        toy_trainer(tmp_path / "run", inline=inline).run()
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_outcome_of_an_earlier_session_does_not_pass_for_that_of_a_killed_one(tmp_path: Path) -> None:
    """The result of the session before is gone from the moment at which the next one has the directory."""
    run_dir = tmp_path / "run"
    toy_trainer(run_dir, inline=True).run()
    assert (run_dir / "result.json").exists()
    seen: list[bool] = []

    class Sink:
        def write(self, scalars: object, step: int, wall_time: float) -> None:
            seen.append((run_dir / "result.json").exists())

        def close(self) -> None:
            return

    toy_trainer(
        run_dir, inline=True, resume="latest", total_env_steps=1400, sinks=[Sink()], learner={"delay_s": 0.01}
    ).run()
    # The last point is written after the outcome; the updates of this session take several intervals of logging.
    assert len(seen) > 1
    assert seen[0] is False
    assert (run_dir / "result.json").exists()
