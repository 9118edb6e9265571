"""Processor time and memory of workers, and the process trees that a shutdown must empty, through psutil."""

from __future__ import annotations

import os

__all__ = ["process_tree", "process_usage"]


def process_usage(pid: int) -> dict[str, float]:
    """Return ``cpu_s`` (user and system seconds since the start) and ``rss_bytes``; empty where the process is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except psutil.Error:
        return {}
    return {"cpu_s": times.user + times.system, "rss_bytes": float(memory.rss)}


def process_tree(pid: int | None = None) -> tuple[int, ...]:
    """Return the pids of all descendants of ``pid`` (None: of this process), without zombies, sorted."""
    import psutil

    try:
        children = psutil.Process(os.getpid() if pid is None else pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return ()
    return tuple(sorted(child.pid for child in children if _is_alive(child)))


def _is_alive(process: object) -> bool:
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
