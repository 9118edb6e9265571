"""Where log points go.  Anything with ``write`` and ``close`` is a sink: Weights & Biases or MLflow fit too."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from numa_collectors.errors import ConfigError

__all__ = ["JsonlSink", "Sink", "TensorBoardSink", "check_run_dir"]

JSONL_NAME = "metrics.jsonl"
EVENTS_GLOB = "events.out.tfevents.*"

_file_numbers = itertools.count()


@runtime_checkable
class Sink(Protocol):
    """Takes the scalars of one log point after another, each with a step greater than the one before."""

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        """Take one point; ``step`` is in environment steps, ``wall_time`` in seconds since the epoch."""

    def close(self) -> None:
        """Flush and release; may be called twice."""


def check_run_dir(
    run_dir: str | os.PathLike[str], *, resume: bool = False, patterns: tuple[str, ...] = (EVENTS_GLOB, JSONL_NAME)
) -> None:
    """Raise :class:`ConfigError` where ``run_dir`` holds metrics of another run; changes nothing.

    TensorBoard merges all event files of a directory into one curve, so that two runs in it become one that never was.
    """
    directory = Path(run_dir)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"run_dir: expected a directory, got the file {directory}; choose another run_dir")
    found = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
    if found and not resume:
        raise ConfigError(
            f"run_dir: expected one without metrics of another run, got {found[0]} in {directory}; "
            f"choose another run_dir, or set resume=latest to continue that run"
        )


class JsonlSink:
    """One JSON object a line: ``{"step": ..., "wall_time": ..., "<tag>": ...}``; standard library only.

    Values that are not finite are written as null, since JSON has no other way.  With ``resume_step`` the lines after
    that step, and a line that a kill tore, are dropped first: the run goes over those steps again.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        check_run_dir(run_dir, resume=resume_step is not None, patterns=(JSONL_NAME,))
        self.path = Path(run_dir) / JSONL_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step is not None and self.path.exists():
            self._drop_after(resume_step)
        self._file = self.path.open("a", encoding="utf-8")

    def _drop_after(self, resume_step: int) -> None:
        kept = [line for line in self.path.read_text(encoding="utf-8").split("\n") if _step_of(line) <= resume_step]
        aside = self.path.with_suffix(".jsonl.tmp")
        aside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        aside.replace(self.path)

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        """Append one line and hand it to the kernel: a killed process loses nothing that was written."""
        values = {tag: float(value) if math.isfinite(value) else None for tag, value in scalars.items()}
        self._file.write(json.dumps({"step": step, "wall_time": wall_time, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity for a torn or foreign one."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return math.inf
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else math.inf


class TensorBoardSink:
    """Scalars in an event file, through tensorboard's own record writer; needs neither torch nor TensorFlow.

    With ``resume_step`` the file opens with a session start at that step, at which TensorBoard drops what an earlier
    file of the directory holds after it.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, resume_step: int | None = None) -> None:
        check_run_dir(run_dir, resume=resume_step is not None, patterns=(EVENTS_GLOB,))
        # Imported here: they take half a second, and the layers that import this module run without tensorboard.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._session_log: Any = event_pb2.SessionLog
        self._summary: Any = summary_pb2.Summary
        directory = Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard orders the files of a directory by name: the time must come first.
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self.path = directory / name
        self._file: IO[bytes] = self.path.open("wb")
        self._records: Any = RecordWriter(self._file)
        self._write_event(wall_time=time.time(), file_version="brain.Event:2")
        if resume_step is not None:
            start = self._session_log(status=self._session_log.START)
            self._write_event(wall_time=time.time(), step=resume_step + 1, session_log=start)

    def _write_event(self, **fields: Any) -> None:
        self._records.write(self._event(**fields).SerializeToString())
        self._file.flush()

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        """Write one event with a value for each tag."""
        values = [self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        self._write_event(wall_time=wall_time, step=step, summary=self._summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
