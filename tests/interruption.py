"""KeyboardInterrupt before a chosen instruction of the library, as Ctrl-C can come before any."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["is_interrupted"]


class Interruption:
    """A trace function that raises KeyboardInterrupt before the library's bytecode instruction ``number``."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interruption | None:
        if "numa_collectors" not in frame.f_code.co_filename.rsplit("tests", 1)[0]:
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
