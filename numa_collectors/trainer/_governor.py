"""How many gradient updates are due: one rule for every mode.

A run has a lower and an upper update-to-data ratio (updates per env step).  Below the lower one the learner pays what it
owes before it ingests anything more, so back-pressure slows the collectors; at the upper one it waits for data.  ``strict``
is both ratios equal, ``learner_bound`` is 0 and infinity, and everything between is a two-sided governor.

Guarantees
    * Counted on *ingested* transitions, in whole numbers and fractions: no drift, no rounding, over any mix of shard sizes.
    * Warm-up transitions are never paid for, at the start and after a resume, so no burst of updates follows either.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

__all__ = ["Governor"]


@dataclass
class Governor:
    """The account of one session.

    ``lower`` and ``upper`` are in updates per env step (``upper`` may be ``None``: no bound); ``warm_up`` is the number of
    transitions that this session must ingest before the first update; ``chunk`` is the most updates made between two looks
    at the rings.
    """

    lower: Fraction
    upper: Fraction | None
    warm_up: int
    chunk: int
    ingested: int = 0
    done: int = 0

    @classmethod
    def strict(cls, *, num_updates: int, num_envs: int, warm_up: int) -> Governor:
        """Exactly ``num_updates`` for every ``num_envs`` transitions after the warm-up."""
        ratio = Fraction(num_updates, num_envs)
        return cls(lower=ratio, upper=ratio, warm_up=warm_up, chunk=num_updates)

    @classmethod
    def learner_bound(
        cls, *, num_updates: int, warm_up: int, utd_min: float | None = None, utd_max: float | None = None
    ) -> Governor:
        """Never wait once started, within the optional bounds ``utd_min`` and ``utd_max`` (updates per env step)."""
        return cls(
            lower=Fraction(0) if utd_min is None else Fraction(utd_min).limit_denominator(1_000_000),
            upper=None if utd_max is None else Fraction(utd_max).limit_denominator(1_000_000),
            warm_up=warm_up,
            chunk=num_updates,
        )

    @property
    def started(self) -> bool:
        """Whether the warm-up is over."""
        return self.ingested >= self.warm_up and self.ingested > 0

    @property
    def owed(self) -> int:
        """Updates that must be made before anything more is ingested (and before the run ends)."""
        return max(0, int(self.lower * max(0, self.ingested - self.warm_up)) - self.done)

    @property
    def missing(self) -> int:
        """Env steps that must come in before an update is due; 0 where one is, or may be made without data."""
        warm_up = max(self.warm_up, 1) - self.ingested
        if self.upper is None:
            return max(0, warm_up)
        return max(0, warm_up, self.warm_up + ceil((self.done + 1) / self.upper) - self.ingested)

    def due(self) -> int:
        """Updates to make now: what is owed, else what the upper ratio still allows; at most one chunk."""
        if not self.started:
            return 0
        if self.owed:
            return min(self.owed, self.chunk)
        if self.upper is None:
            return self.chunk
        allowed = int(self.upper * max(0, self.ingested - self.warm_up)) - self.done
        return min(max(0, allowed), self.chunk)
