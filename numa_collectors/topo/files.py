"""Reading small kernel files below a root, where any of them may be absent, unreadable or vanish.

Absence is ordinary (None).  Anything else that goes wrong is remembered in words, so that a masked sysfs shows up in
``Topology.problems`` rather than as a machine that merely looks smaller.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from typing import TypeVar

from numa_collectors._cpulist import parse_cpulist, parse_cpumap

__all__ = ["Root"]

_CHUNK_BYTES = 1 << 16
# A CPU or node that is unplugged while its files are read answers with one of these.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENXIO})

T = TypeVar("T")


class Root:
    """A directory that stands for ``/``."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.is_live = os.path.realpath(self.path) == "/"
        self.problems: list[str] = []
        self._prefix = self.path.rstrip("/") + "/"

    def join(self, relative: str) -> str:
        return self._prefix + relative

    def read(self, relative: str) -> str | None:
        """Return the text without NUL bytes and surrounding blanks, or None where there is none to be had."""
        try:
            descriptor = os.open(self._prefix + relative, os.O_RDONLY)
        except OSError as error:
            self._note(relative, error)
            return None
        chunks = []
        try:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                chunks.append(chunk)
        except OSError as error:
            self._note(relative, error)
            return None
        finally:
            os.close(descriptor)
        return b"".join(chunks).replace(b"\0", b"").decode("utf-8", "replace").strip()

    def names(self, relative: str) -> list[str]:
        """Return the names in a directory, sorted; none where it is absent."""
        try:
            return sorted(os.listdir(self._prefix + relative))
        except OSError as error:
            self._note(relative, error)
            return []

    def numbered(self, relative: str, prefix: str) -> list[int]:
        """Return the numbers N of the entries ``prefix`` + N, rising."""
        start = len(prefix)
        return sorted(
            int(name[start:])
            for name in self.names(relative)
            if name.startswith(prefix) and name[start:].isdigit() and name[start:].isascii()
        )

    def exists(self, relative: str) -> bool:
        return os.path.exists(self._prefix + relative)

    def integer(self, relative: str) -> int | None:
        return self._parsed(relative, int)

    def cpulist(self, relative: str) -> tuple[int, ...] | None:
        return self._parsed(relative, parse_cpulist)

    def cpumap(self, relative: str) -> tuple[int, ...] | None:
        return self._parsed(relative, parse_cpumap)

    def siblings(self, cpu: int, lists: Iterable[str], maps: Iterable[str]) -> tuple[int, ...] | None:
        """Return the first of these sets that holds ``cpu`` itself, lists before maps; None where none does.

        A set of a CPU's siblings that leaves the CPU out is wrong (edited or emulated sysfs), whatever else it says.
        """
        for names, read in ((lists, self.cpulist), (maps, self.cpumap)):
            for name in names:
                found = read(name)
                if found is not None and cpu in found:
                    return found
        return None

    def _parsed(self, relative: str, parse: Callable[[str], T]) -> T | None:
        text = self.read(relative)
        if text is None:
            return None
        try:
            return parse(text)
        except ValueError as error:
            self.problems.append(f"/{relative}: {error}")
            return None

    def _note(self, relative: str, error: OSError) -> None:
        if error.errno not in _GONE:
            self.problems.append(f"/{relative}: {error.strerror or error}")
