"""KeyboardInterrupt before a chosen instruction of the library, as Ctrl-C can come before any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numa_collectors

__all__ = ["is_interrupted"]


LIBRARY = str(Path(numa_collectors.__file__).parent)


class Interruption:
    """A trace function that raises KeyboardInterrupt before the library's bytecode instruction ``number``."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interruption | None:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self


def is_interrupted(action: Callable[[], object], number: int) -> bool:
    """Run ``action`` with an interrupt before instruction ``number``; False when it ended before."""
    before = sys.gettrace()
    sys.settrace(Interruption(number))
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
