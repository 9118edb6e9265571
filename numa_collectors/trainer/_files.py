"""The run directory: one run at a time, its configuration, its placement and its outcome."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from numa_collectors.checkpoint import RunLock
from numa_collectors.checkpoint.lock import unwritable
from numa_collectors.config import RunConfig
from numa_collectors.errors import WorkerFailedError
from numa_collectors.trainer._ranks import Ranks

__all__ = ["RunFiles", "RunResult", "RunStatus"]

logger = logging.getLogger(__name__)

RESULT_NAME = "result.json"

RunStatus = Literal["finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunResult:
    """How a run ended; with several ranks, this one's part of it.

    ``env_steps`` and ``updates`` are the whole run's, a resumed history included; ``discarded_slots`` were committed and not
    ingested because the run was interrupted.  ``placement`` has one line a worker: what its binding was found to be.
    """

    status: RunStatus
    env_steps: int
    updates: int
    weight_version: int
    wall_s: float
    run_dir: Path
    checkpoint: Path | None = None
    signal: str | None = None
    discarded_slots: int = 0
    num_restarts: int = 0
    placement: Mapping[str, str] | None = None
    error: str | None = None

    @property
    def exit_code(self) -> int:
        """0 when the target was reached and saved, 130 after Ctrl-C, 143 after SIGTERM, 1 after a failure."""
        if self.status == "interrupted":
            return 143 if self.signal == "SIGTERM" else 130
        return 0 if self.status == "finished" and self.error is None else 1

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [
            f"{self.status}: {self.env_steps:,} env steps and {self.updates:,} updates in {self.wall_s:.1f} s",
            *(f"  {name}: {text}" for name, text in (self.placement or {}).items()),
            f"  files: {self.run_dir}",
        ]
        if self.checkpoint is not None:
            lines.append(f"  checkpoint: {self.checkpoint}")
        if self.error is not None:
            lines.append(f"  error: {self.error.splitlines()[0]}")
        return "\n".join(lines)


class RunFiles:
    """Makes and locks the run directory; nothing is made before the configuration has been accepted."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        run_dir = config.run_dir or _fresh_directory(Path("runs") / time.strftime("%Y-%m-%d_%H-%M-%S"))
        self.run_dir = ranks.directory(run_dir)
        self._lock = RunLock(self.run_dir)
        try:
            # That of the session before: a run that is killed has no outcome, and must not show another's.
            (self.run_dir / RESULT_NAME).unlink(missing_ok=True)
            self._write("config.json", config.model_dump(mode="json"))
        except OSError as error:
            self._lock.release()
            raise unwritable(self.run_dir, error) from error
        except BaseException:
            self._lock.release()
            raise

    def write_placement(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep what every worker's binding was found to be."""
        self._write("placement.json", reports)

    def write_result(self, result: RunResult) -> None:
        """Keep the outcome."""
        try:
            self._write(RESULT_NAME, {**asdict(result), "exit_code": result.exit_code})
        except OSError:  # a full disk, say: the outcome is returned or raised all the same
            logger.exception("the outcome of the run could not be written into %s", self.run_dir)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        path = self.run_dir / name
        aside = path.with_suffix(".tmp")
        try:
            aside.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Let other runs use the directory."""
        self._lock.release()


def _fresh_directory(path: Path) -> Path:
    """Make and return ``path``, or ``path-1`` and so on: two runs may start in the same second."""
    for number in itertools.count():
        candidate = path if number == 0 else path.with_name(f"{path.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")


class RunFailedError(WorkerFailedError):
    """The run ended by a failure; ``result`` says how far it came, ``failure`` which worker was the first to fail."""

    def __init__(self, message: str, failure: object = None, result: RunResult | None = None) -> None:
        super().__init__(message, failure)
        self.result = result

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.failure, self.result))
