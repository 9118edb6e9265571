"""Drives a real Jupyter kernel as a notebook does: ``python -m tests.trainer.notebook RUN_DIR``; prints what came of it."""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0

TRAIN = """
from tests.trainer.toys import toy_trainer
trainer = toy_trainer({run_dir!r}, collector={{"delay_s": 0.005}}, total_env_steps=7_000_000, tensorboard=False)
result = trainer.run()
print(result.status, result.exit_code)
"""
AFTERWARDS = """
import signal
import psutil
commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
left = [command for command in commands if "resource_tracker" not in command]  # one an interpreter, by design
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, result.checkpoint.exists(), left)
"""


def execute(client: Any, code: str) -> str:
    """Start a cell and return the id under which its output comes."""
    return str(client.execute(code))


def finish(client: Any, message_id: str) -> str:
    """Return what a cell printed or raised, once it is through."""
    text, deadline = "", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            message = client.get_iopub_msg(timeout=1.0)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != message_id:
            continue
        content = message["content"]
        text += content.get("text", "") + "\n".join(content.get("traceback", []))
        if message["msg_type"] == "status" and content["execution_state"] == "idle":
            return text
    raise TimeoutError(f"the cell did not end: {text}")


def main(run_dir: str) -> None:
    """Train in a cell, press the stop button, look what is left, and say it."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**os.environ, "PYTHONPATH": os.getcwd()})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE_S)
        cell = execute(client, TRAIN.format(run_dir=run_dir))
        deadline = time.monotonic() + PATIENCE_S
        metrics = Path(run_dir, "metrics.jsonl")
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < deadline, "the run did not begin"
            time.sleep(0.05)
        manager.interrupt_kernel()
        trained = finish(client, cell)
        afterwards = finish(client, execute(client, AFTERWARDS))
        print(json.dumps({"trained": trained, "afterwards": afterwards}))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(sys.argv[1])
