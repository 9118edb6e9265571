"""The file that a checkpoint's state is written to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

__all__ = ["HashingFile"]


class HashingFile:
    """The file that ``torch.save`` writes to.

    torch's archive writer may end the process when its file raises; so the first refusal of the disk is kept, further
    writes are dropped, and the caller raises.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        written = 0
        while self.error is None and written < len(view):
            try:
                written += self._file.write(view[written:]) or 0
            except OSError as error:
                self.error = error
        self._hash.update(view)
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Writes are not buffered."""

    def finish(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        os.fsync(self._file.fileno())
        return {"size_bytes": self.size_bytes, "sha256": self._hash.hexdigest()}

    def close(self) -> None:
        self._file.close()
