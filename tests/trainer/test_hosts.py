"""The same orderly end where something else than a shell holds the reins: a notebook, ``torchrun``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from numa_collectors import checkpoint
from tests.trainer.disturbances import REPOSITORY, processes_of
from tests.worker.helpers import until

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


def wait_for_steps(run_dir: Path, process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        assert time.monotonic() < deadline, "no log point in time"
        time.sleep(0.05)


def check_orderly_end(run_dir: Path, code: int) -> None:
    result = json.loads((run_dir / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("interrupted", code)
    progress = checkpoint.load(run_dir).progress
    assert (progress.env_steps, progress.updates) == (result["env_steps"], result["updates"])


def test_the_stop_button_of_a_notebook(tmp_path: Path) -> None:
    if importlib.util.find_spec("ipykernel") is None:
        pytest.skip("needs ipykernel, which is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.notebook", str(tmp_path / "run")],
        cwd=REPOSITORY,
        env={**os.environ, "DISTURBANCE": json.dumps({"folder": str(tmp_path)})},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["trained"].splitlines()[-1] == "interrupted 130"
    # The kernel lives on, with its own handler; the run has left it no children.
    assert said["afterwards"].split(maxsplit=2) == ["True", "True", "[]\n"]
    check_orderly_end(tmp_path / "run", 130)
    until(lambda: not processes_of(tmp_path), "the end of all that the kernel started")


@pytest.mark.timeout(300)  # more than the waits below together
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_torchrun(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The agent passes the signal on; how it ends itself is its own affair."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script), str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, *command, repr({"tensorboard": False})],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "DISTURBANCE": json.dumps({"folder": str(tmp_path)})},
        start_new_session=True,
    ) as agent:
        try:
            wait_for_steps(tmp_path / "run", agent)
            agent.send_signal(number)
            output, _ = agent.communicate(timeout=90)
            assert agent.returncode != 0, output
            check_orderly_end(tmp_path / "run", code)
            until(lambda: not processes_of(tmp_path), "the end of all that the agent started")
        finally:
            # A run that was not ended would never end.
            for pid in processes_of(tmp_path):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
