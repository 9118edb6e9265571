"""One run at a time in a run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from numa_collectors.errors import ConfigError

__all__ = ["RunLock", "unwritable"]

LOCK_NAME = ".lock"


class RunLock:
    """Holds a run directory from construction until ``release``; the kernel lets go when the process ends.

    An advisory ``flock(2)`` on ``<run_dir>/.lock``, which is made if absent and stays: removing it would let two
    processes hold two files of the same name.  The descriptor is not inherited over exec, so that no worker keeps the
    lock alive.  Raises :class:`ConfigError` where another process holds it, or where the directory cannot be written.
    Without effect on Windows, which has no ``flock``.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.path = Path(run_dir) / LOCK_NAME
        self._fd: int | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        except OSError as error:
            raise unwritable(self.path, error) from None
        try:
            self._take(fd)
        except OSError as error:
            os.close(fd)
            raise unwritable(self.path, error) from None
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def _take(self, fd: int) -> None:
        if sys.platform == "win32":
            return
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise ConfigError(
                f"run_dir: expected one that no run uses, got {self.path.parent}, held by process {holder}; "
                f"wait for that run, end it, or choose another run_dir"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go; may be called twice."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        if sys.platform != "win32":
            import fcntl

            # Closing alone lets go only with the last copy of the descriptor, and a child between fork and exec has one.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def unwritable(path: Path, error: OSError) -> ConfigError:
    """Return the error of a run directory that cannot be written."""
    return ConfigError(
        f"run_dir: expected a directory that can be written, got {error.strerror} for {error.filename or path}; "
        f"choose another run_dir, make room, or change its permissions"
    )
