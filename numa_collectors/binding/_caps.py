"""Caps on the thread pools of numerical libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["THREAD_VARIABLES", "ThreadCaps", "thread_caps"]

# Read once, when the library is loaded: they count only if they are exported before the worker's exec.  torch takes its
# number from OMP_NUM_THREADS or MKL_NUM_THREADS.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "BLIS_NUM_THREADS",
)


class ThreadCaps(dict[str, str]):
    """The variables to export; :attr:`kept` are those that the user had set, which win."""

    def __init__(self, caps: Mapping[str, str], kept: Mapping[str, str]) -> None:
        super().__init__(caps)
        self.kept = dict(kept)


def thread_caps(num_threads: int | None, env: Mapping[str, str] | None = None) -> ThreadCaps:
    """Return the environment that caps every known thread pool at ``num_threads`` (None: no cap).

    ``env`` is the environment that the worker would inherit (default: this process's).
    """
    if num_threads is None:
        return ThreadCaps({}, {})
    if num_threads < 1:
        raise ValueError(f"expected num_threads of at least 1, got {num_threads}")
    inherited = os.environ if env is None else env
    kept = {name: inherited[name] for name in THREAD_VARIABLES if inherited.get(name)}
    return ThreadCaps({name: str(num_threads) for name in THREAD_VARIABLES if name not in kept}, kept)
