"""Room for the descriptors of many workers, made before the first of them is started."""

from __future__ import annotations

import logging
import os
import sys

from numa_collectors.errors import NumaCollectorsError

__all__ = ["PER_WORKER", "ensure_descriptors"]

PER_WORKER = 7
"""Descriptors that a parent holds for each worker that runs (measured), those of multiprocessing's own pipes included."""

# What the interpreter, the launcher, the guardian and the libraries that a run loads open meanwhile.
_RESERVE = 32

logger = logging.getLogger(__name__)


def ensure_descriptors(num_workers: int, num_regions: int = 0) -> None:
    """Make room for the descriptors of so many workers and shared regions, before the first of them is made.

    Raises this process's soft limit of open files up to the hard one; workers inherit it.  Raises NumaCollectorsError
    where the hard limit is too low; nothing is changed then.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _num_open() + PER_WORKER * num_workers + num_regions + _RESERVE
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard != resource.RLIM_INFINITY and need > hard:
        raise NumaCollectorsError(
            f"{num_workers} workers: expected room for {need} open files, got a hard limit of {hard} (RLIMIT_NOFILE); raise it "
            "(`ulimit -Hn` as root, LimitNOFILE= of a systemd unit, `--ulimit nofile=` of a container) or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
    logger.info("the limit of open files is now %d, it was %d: %d workers are to be started", need, soft, num_workers)


def _num_open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return 0
