"""What goes wrong in a worker ends the run, or does not, as the configuration says; the cause is named and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from numa_collectors import checkpoint
from numa_collectors.metrics import process_tree
from numa_collectors.trainer import RunFailedError
from tests.trainer.toys import toy_trainer

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "planted failure of the environment"),
        ("nan", "reward"),
        ("exit0", "before its work was done"),
        ("sysexit", "SystemExit"),
        ("kill", "SIGKILL"),
        ("segv", "SIGSEGV"),
    ],
)
def test_a_collector_that_fails_ends_the_run_with_its_cause(tmp_path: Path, fault: str, words: str) -> None:
    with pytest.raises(RunFailedError, match=words) as caught:
        toy_trainer(tmp_path / "run", collector={"fault": fault, "fault_rank": 1, "fault_step": 30}).run()
    failure, result = caught.value.failure, caught.value.result
    assert failure.name == "collector[1]"
    assert result.status == "failed"
    assert result.exit_code == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "failed"
    if fault == "nan":
        assert "environment" in str(failure)
        assert "step 30" in str(failure)


def test_a_collector_that_fails_at_once_is_reported_before_the_first_update(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="planted failure of the environment"):
        toy_trainer(tmp_path / "run", collector={"fault": "raise", "fault_step": 0}).run()


@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_a_hung_collector_is_seen_and_ends_the_run(tmp_path: Path, fault: str) -> None:
    with pytest.raises(RunFailedError, match="hung") as caught:
        toy_trainer(tmp_path / "run", hang_timeout_s=5.0, collector={"fault": fault}).run()
    if fault == "hang":
        assert "misbehave" in (caught.value.failure.stack or "")


def test_a_learner_that_fails_is_the_cause_and_the_last_checkpoint_stands(tmp_path: Path) -> None:
    with pytest.raises(RunFailedError, match="planted failure of the learner") as caught:
        toy_trainer(
            tmp_path / "run", learner={"fail_at": 50, "delay_s": 0.01}, checkpoint_interval_s=0.2, num_updates=1
        ).run()
    assert caught.value.failure.name == "learner[0]"
    assert checkpoint.load(tmp_path / "run").progress.updates <= 50


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


SCRIPT = """
import sys
from tests.trainer.toys import toy_trainer
if __name__ == "__main__":
    trainer = toy_trainer(sys.argv[1], collector={"delay_s": 0.01}, total_env_steps=7_000_000, **eval(sys.argv[2]))
    print("ready", flush=True)
    result = trainer.run()
    print(result.summary(), flush=True)
    sys.exit(result.exit_code)
"""


def start_script(tmp_path: Path, **changes: object) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), repr(changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        start_new_session=True,
    )


def wait_for_steps(run_dir: Path, process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, "no log point in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "to_group", "inline", "code"),
    [
        (signal.SIGINT, False, False, 130),
        (signal.SIGINT, True, False, 130),
        (signal.SIGTERM, False, False, 143),
        (signal.SIGINT, False, True, 130),
    ],
)
def test_the_first_signal_ends_the_run_in_an_orderly_way(
    tmp_path: Path, number: signal.Signals, to_group: bool, inline: bool, code: int
) -> None:
    process = start_script(tmp_path, inline=inline)
    wait_for_steps(tmp_path / "run", process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert "interrupted" in output
    assert "Traceback" not in output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    loaded = checkpoint.load(tmp_path / "run")
    assert loaded.progress.env_steps == result["env_steps"] > 0


def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    process = start_script(tmp_path)
    wait_for_steps(tmp_path / "run", process)
    children = process_tree(process.pid)
    assert len(children) >= 3
    process.kill()
    process.communicate(timeout=60)
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in children):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.05)


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
