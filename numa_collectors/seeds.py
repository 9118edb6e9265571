"""Seeds of a run: collector 0 gets the run's own, everything else a stream of its own.

*Guarantees.* The streams of two (seed, role, rank, generation) differ, and none depends on the number of collectors or
of environments: more of either leaves those that were there unchanged.  ``seed + rank``, the common way, gives run 1's
second collector what run 2's first one has.

*Not covered.* Whether an environment honours its seed; the order in which processes reach the learner.
"""

from __future__ import annotations

import random
import sys
from typing import Literal

import numpy as np

__all__ = ["Role", "collector_seed", "env_seeds", "seed_everything", "seed_sequence", "stream_seed"]

Role = Literal["collector", "env", "learner", "trainer"]

# The numbers are part of every stream: appending a role is safe, renumbering changes all runs.
_ROLE_KEYS: dict[Role, int] = {"collector": 0, "env": 1, "learner": 2, "trainer": 3}


def seed_sequence(seed: int, role: Role, rank: int = 0, generation: int = 0) -> np.random.SeedSequence:
    """Return the root of all randomness of one worker, for ``numpy.random.default_rng`` and ``.spawn``.

    ``rank`` counts run-wide, across hosts; ``generation`` counts the restarts of the worker.
    """
    if seed < 0 or rank < 0 or generation < 0:
        raise ValueError(
            f"expected seed, rank and generation of at least 0, got {seed}, {rank} and {generation}; "
            f"negative numbers have no stream"
        )
    return np.random.SeedSequence(seed, spawn_key=(_ROLE_KEYS[role], rank, generation))


def stream_seed(seed: int, role: Role, rank: int = 0, generation: int = 0) -> int:
    """Return a seed below 2^32, which every library takes, drawn from the worker's stream."""
    return int(seed_sequence(seed, role, rank, generation).generate_state(1, np.uint32)[0])


def collector_seed(seed: int, rank: int, generation: int = 0) -> int:
    """Return the seed of a collector: ``seed`` itself for the first start of collector 0, else from its own stream."""
    if rank == 0 and generation == 0 and seed >= 0:
        return seed
    return stream_seed(seed, "collector", rank, generation)


def env_seeds(seed: int, rank: int, num_envs: int, generation: int = 0, *, bits: int = 63) -> list[int]:
    """Return one seed below 2^``bits`` for each environment of collector ``rank``.

    63 bits keep 10^5 environments of a sweep apart (a chance of 10^-9 that two agree); simulators that take an
    ``int32`` need ``bits=31``, where two pairs of 10^5 agree.  The first seeds do not depend on ``num_envs``.
    """
    if not 1 <= bits <= 64:
        raise ValueError(f"expected 1 to 64 bits, got {bits}; use 63, or 31 for simulators that take an int32")
    words = seed_sequence(seed, "env", rank, generation).generate_state(num_envs, np.uint64)
    return [int(word) >> (64 - bits) for word in words]


def seed_everything(seed: int) -> None:
    """Seed ``random``, numpy's legacy generator and, where it is loaded, torch, in the calling process.

    torch is not imported for the purpose: a worker without it stays without it.  Call again after importing torch late.
    """
    random.seed(seed)
    words = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(seed.bit_length(), 1), 32)]
    np.random.seed(words[0] if len(words) == 1 else words)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed % 2**64)
