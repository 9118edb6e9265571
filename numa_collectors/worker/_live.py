"""Which workers of this process live, for those who must end them all."""

from __future__ import annotations

import atexit
import multiprocessing.util  # noqa: F401 - its exit handler, which joins without a bound, is to run after the one below
import os
from typing import Protocol

__all__ = ["kill_all_workers", "live"]


class _Killable(Protocol):
    def kill(self) -> None: ...

    def join(self, timeout_s: float | None) -> bool: ...


live: set[_Killable] = set()


def kill_all_workers() -> None:
    """Kill and reap every worker of this process: for a second Ctrl-C and for the interpreter's exit."""
    handles = list(live)
    for handle in handles:
        handle.kill()
    for handle in handles:
        handle.join(2.0)


atexit.register(kill_all_workers)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=live.clear)
