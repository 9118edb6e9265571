"""Every disturbance ends the run within its bound, with the right exit code, its cause in words, and nothing left behind.

The list is that of what other trainers do not survive: processes killed, stopped and hung in each phase; signals to one
process, to the group, to the parent alone; environments that leave, crash, and give what they did not promise.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from numa_collectors import checkpoint
from tests.trainer.disturbances import (
    HANG_TIMEOUT_S,
    PATIENCE_S,
    SHUTDOWN_TIMEOUT_S,
    START_TIMEOUT_S,
    Outcome,
    Row,
    Stage,
)

INT, TERM, KILL, STOP = signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP

COLLECTOR = ("collector", 1)
LEARNER = ("learner", 0)
SAVING = {"checkpoint_interval_s": 0.1}
HANGS = {"hang_timeout_s": HANG_TIMEOUT_S}
LATE = {"start_timeout_s": START_TIMEOUT_S}
# What a kill may cost beyond the shutdown: reaping, and the look at what else there is.
HANG_BOUND_S = HANG_TIMEOUT_S + SHUTDOWN_TIMEOUT_S + 3.0
START_BOUND_S = START_TIMEOUT_S + SHUTDOWN_TIMEOUT_S + 3.0


def interrupted(name: str, phase: str, *signals: tuple[signal.Signals, str], code: int = 130, **changes: object) -> Row:
    """The parent is signalled while collector 1 is in ``phase``."""
    early = phase in ("imports", "boot")
    plant = ("any", 0, phase, "mark") if phase == "imports" else (*COLLECTOR, phase, "mark")
    values: dict[str, object] = {
        "words": "ending in an orderly way",
        "status": "interrupted",
        "checkpoints": "any" if early else "final",
        **changes,
    }
    return Row(name, plant, code, signals=signals, **values)  # type: ignore[arg-type]


ROWS = [
    # Signals to the parent alone and to its group, in each phase.
    interrupted("SIGINT to the parent in training", "training", (INT, "parent")),
    interrupted("SIGINT to the group in training", "training", (INT, "group")),
    interrupted("SIGTERM to the parent in training", "training", (TERM, "parent"), code=143),
    interrupted("SIGINT to the parent during imports", "imports", (INT, "parent")),
    interrupted("SIGINT to the group during imports", "imports", (INT, "group")),
    interrupted("SIGTERM to the parent during boot", "boot", (TERM, "parent"), code=143),
    interrupted("SIGINT to the parent before the first update", "first update", (INT, "parent")),
    Row(
        "SIGINT to the parent while a collector hangs",
        (*COLLECTOR, "training", "hang"),
        130,
        "did not stop in time",
        status="interrupted",
        signals=((INT, "parent"),),
        checkpoints="final",
    ),
    Row(
        "SIGINT to the parent, and again",
        (*COLLECTOR, "training", "hang"),
        -2,
        "second SIGINT: killing the workers",
        status="interrupted",
        signals=((INT, "parent"), (INT, "parent")),
        config={"shutdown_timeout_s": 60.0},
    ),
    interrupted(
        "SIGKILL of the parent, collectors with processes of their own",
        "training",
        (KILL, "parent"),
        code=-9,
        words="",
        status=None,
        checkpoints="none",
        helpers=True,
    ),
    interrupted("SIGINT, inline", "training", (INT, "parent"), words="interrupted: ", config={"inline": True}),
    # A trainer in a thread that is not the main one.  A Python that ends by KeyboardInterrupt ends by the signal itself.
    interrupted("SIGINT, the trainer in a thread", "training", (INT, "parent"), code=-2, program="thread"),
    interrupted(
        "SIGTERM, the trainer in a thread", "training", (TERM, "parent"), code=143, program="thread with signals"
    ),
    # A signal to one worker alone is a failure, whatever the exit code.
    Row("SIGKILL of a collector during imports", ("any", 0, "imports", "kill"), 1, "SIGKILL .*phase import"),
    Row(
        "SIGKILL of a collector during boot", (*COLLECTOR, "boot", "kill"), 1, r"collector\[1\] died, killed by SIGKILL"
    ),
    Row(
        "SIGKILL of a collector before the first update",
        (*COLLECTOR, "first update", "kill"),
        1,
        r"collector\[1\] died, killed by SIGKILL",
    ),
    Row(
        "SIGKILL of a collector in training",
        (*COLLECTOR, "training", "kill"),
        1,
        r"collector\[1\] died, killed by SIGKILL .*(somebody sent SIGKILL|out of memory)",
    ),
    Row(
        "SIGKILL of a collector during a checkpoint",
        (*LEARNER, "second checkpoint", "mark"),
        1,
        r"collector\[0\] died, killed by SIGKILL",
        signals=((KILL, "collector-0"),),
        checkpoints="last",
        config=SAVING,
    ),
    Row(
        "SIGKILL of a collector during shutdown",
        (*COLLECTOR, "shutdown", "kill"),
        0,
        r"collector\[1\] died, killed by SIGKILL",
        status="finished",
        checkpoints="final",
    ),
    Row(
        "SIGINT to one collector",
        (*COLLECTOR, "training", "mark"),
        1,
        r"collector\[1\] raised KeyboardInterrupt",
        signals=((INT, "collector-1"),),
    ),
    Row(
        "SIGTERM to one collector",
        (*COLLECTOR, "training", "mark"),
        1,
        "SIGTERM to this process alone",
        signals=((TERM, "collector-1"),),
    ),
    Row(
        "SIGKILL of the learner during boot",
        (*LEARNER, "boot", "kill"),
        1,
        r"learner\[0\] died, killed by SIGKILL",
        checkpoints="none",
    ),
    Row(
        "SIGKILL of the learner in training",
        (*LEARNER, "training", "kill"),
        1,
        r"learner\[0\] died, killed by SIGKILL",
        checkpoints="none",
    ),
    Row(
        "SIGKILL of the learner during a checkpoint",
        (*LEARNER, "second checkpoint", "kill"),
        1,
        r"learner\[0\] died, killed by SIGKILL",
        checkpoints="last",
        config={**SAVING, "collector_options": {"delay_s": 0.02}},
    ),
    Row(
        "SIGKILL of the learner during the final checkpoint",
        (*LEARNER, "checkpoint", "kill"),
        1,
        r"learner\[0\] died, killed by SIGKILL",
        checkpoints="none",
    ),
    # Stopped and hung.
    Row(
        "SIGSTOP of a collector during imports",
        ("any", 0, "imports", "stop"),
        1,
        "did not become ready in time",
        bound_s=START_BOUND_S,
        config=LATE,
    ),
    Row(
        "a collector hangs during boot",
        (*COLLECTOR, "boot", "hang"),
        1,
        r"(?s)did not become ready in time.*misbehave",
        bound_s=START_BOUND_S,
        config=LATE,
    ),
    Row(
        "SIGSTOP of a collector in training",
        (*COLLECTOR, "training", "stop"),
        1,
        r"collector\[1\] hung .*is stopped",
        bound_s=HANG_BOUND_S,
        config=HANGS,
    ),
    Row(
        "a collector hangs in training",
        (*COLLECTOR, "training", "hang"),
        1,
        r"(?s)collector\[1\] hung .*misbehave",
        bound_s=HANG_BOUND_S,
        config=HANGS,
    ),
    Row(
        "SIGSTOP of the learner in its first update",
        (*LEARNER, "first update", "stop"),
        1,
        r"learner\[0\] hung .*is stopped",
        bound_s=HANG_BOUND_S,
        config=HANGS,
        checkpoints="none",
    ),
    Row(
        "a collector hangs during shutdown",
        (*COLLECTOR, "shutdown", "hang"),
        0,
        r"(?s)collector\[1\] did not stop in time.*misbehave",
        status="finished",
        checkpoints="final",
    ),
    # What an environment or a learner may do.
    Row("step raises in training", (*COLLECTOR, "training", "raise"), 1, "planted failure of the environment"),
    Row(
        "step raises before the first update",
        (*COLLECTOR, "first update", "raise"),
        1,
        "planted failure of the environment",
    ),
    Row(
        "step gives a wrong shape",
        (*COLLECTOR, "training", "shape"),
        1,
        r"collector\[1\].*step 30.*could not broadcast input array from shape \(3,2\) into shape \(3,3\)",
    ),
    Row("step gives NaN", (*COLLECTOR, "training", "nan"), 1, r"(?s)collector\[1\].*environment.*step 30.*reward.*nan"),
    Row("step raises SystemExit(0)", (*COLLECTOR, "training", "sysexit"), 1, r"SystemExit.*never success"),
    Row(
        "os._exit(0) in training",
        (*COLLECTOR, "training", "exit0"),
        1,
        "left with exit code 0 before its work was done",
    ),
    Row("os._exit(3) before the first update", (*COLLECTOR, "first update", "exit3"), 1, "left with exit code 3"),
    Row("a segmentation fault in step", (*COLLECTOR, "training", "segv"), 1, r"(?s)SIGSEGV.*misbehave"),
    Row("the learner cannot be made", (*LEARNER, "boot", "raise"), 1, "planted failure in boot", checkpoints="none"),
    Row(
        "the learner raises in training",
        (*LEARNER, "training", "raise"),
        1,
        r"learner\[0\] raised .*planted failure",
        checkpoints="last",
        config={**SAVING, "collector_options": {"delay_s": 0.02}},
    ),
    # Refused before anything starts: no process, no run directory.
    Row(
        "no such device",
        None,
        2,
        "expected a CUDA device for .cuda:97., got none",
        status=None,
        config={"learner_device": "cuda:97"},
    ),
    Row("no environments", None, 2, "num_envs", status=None, config={"num_envs": 0}),
]


@pytest.fixture(scope="module")
def replays(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Outcome]]]:
    """Replay the rows that were asked for, some at a time: much of a hang is waiting."""
    wanted = [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "row" in item.fixturenames
    ]
    stage = Stage()
    root = tmp_path_factory.mktemp("disturbances")
    pool = ThreadPoolExecutor(3)
    try:
        yield {row.name: pool.submit(stage.replay, row, root / str(number)) for number, row in enumerate(wanted)}
    finally:
        pool.shutdown(cancel_futures=True)
        stage.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_disturbance_ends_the_run(row: Row, replays: dict[str, Future[Outcome]]) -> None:
    outcome = replays[row.name].result()
    print(f"ROW | {row.name} | {outcome.code} | {outcome.seconds:.1f} | {outcome.cause}")
    assert outcome.code == row.code, outcome.output
    assert outcome.left == []
    assert outcome.seconds < row.bound_s + PATIENCE_S / 2
    assert re.search(row.words, outcome.output), outcome.output
    if row.status == "interrupted" and row.code > 0:
        assert "Traceback" not in outcome.output
    check_run_directory(row, outcome)


def check_run_directory(row: Row, outcome: Outcome) -> None:
    """The run directory tells the truth about the run's end."""
    result = outcome.result
    if row.status is None:
        assert result is None
        assert row.code == -9 or not outcome.run_dir.exists()
    else:
        assert result is not None
        assert result["status"] == row.status
        assert result["exit_code"] == (130 if row.code == -2 else row.code)
    newest = checkpoint.latest(outcome.run_dir) if outcome.run_dir.exists() else None
    if result is not None:
        assert result["checkpoint"] == (None if newest is None else str(newest))
    if row.checkpoints == "none":
        assert newest is None
    elif newest is not None:
        assert result is not None
        progress = checkpoint.load(newest).progress
        assert progress.env_steps <= result["env_steps"]
        if row.checkpoints == "last":
            assert progress.env_steps > 0
        elif row.checkpoints == "final":
            assert (progress.env_steps, progress.updates) == (result["env_steps"], result["updates"])
    else:
        assert row.checkpoints == "any"
