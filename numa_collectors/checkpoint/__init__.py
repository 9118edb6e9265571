"""Checkpoints of a run: written aside and renamed, verified on loading, with no pickled code executed."""

from __future__ import annotations

from numa_collectors.checkpoint.lock import RunLock
from numa_collectors.checkpoint.rng import generator_state, restore_generator, restore_rng, rng_state
from numa_collectors.checkpoint.store import (
    SCHEMA,
    Checkpoint,
    Progress,
    check_matches,
    checkpoints,
    clean_stale,
    keep_last,
    latest,
    load,
    read_manifest,
    save,
)

__all__ = [
    "SCHEMA",
    "Checkpoint",
    "Progress",
    "RunLock",
    "check_matches",
    "checkpoints",
    "clean_stale",
    "generator_state",
    "keep_last",
    "latest",
    "load",
    "read_manifest",
    "restore_generator",
    "restore_rng",
    "rng_state",
    "save",
]
