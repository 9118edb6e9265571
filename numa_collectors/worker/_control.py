"""Control words that a worker and its parent share: one page, one writer a word.

Guarantees: a reader sees each 8-byte word whole, since aligned 8-byte accesses are atomic on every CPU that runs Linux
with 64 bits; no word has two writers, so nothing is ever locked and a killed process can hold nothing.
Assumes: nothing about the order in which two words become visible; no decision here rests on one.
Not covered: a phase's text may be seen mixed when it changes twice during one read; it is shown to people, never
compared.
"""

from __future__ import annotations

import time

from numa_collectors.shm import Region

__all__ = ["Control"]

_SIZE_BYTES = 4096

# Words 0 to 7, one cache line, are the parent's.
_STOP = 0
_RECHECK = 1
_STATS_TAKEN = 2
# Words 8 to 15 are the worker's.
_HEARTBEATS = 8
_HEARTBEAT_NS = 9
_WAITING = 10
_STEPS = 11
_STACK_READY = 12
_PHASE_SLOT = 13
_WAIT_LIMIT_MS = 14
_NUM_WORDS = 16

_PHASE_OFFSET = 8 * _NUM_WORDS
_PHASE_BYTES = 64


class Control:
    """Typed access to the words; :attr:`region` is what travels to the worker."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._words: memoryview = region.buf[: 8 * _NUM_WORDS].cast("q")
        self._phases: memoryview = region.buf[_PHASE_OFFSET : _PHASE_OFFSET + 2 * _PHASE_BYTES]

    @classmethod
    def create(cls, name: str) -> Control:
        """Make the page in the parent."""
        return cls(Region.create(f"{name} control", _SIZE_BYTES, policy="none"))

    def close(self) -> None:
        """Let go of the page; a second call does nothing."""
        self._words.release()
        self._phases.release()
        self.region.close()

    # The parent's words.

    def request_stop(self) -> None:
        """Ask the worker to end after its current step."""
        self._words[_STOP] = 1

    @property
    def stop_requested(self) -> bool:
        """Whether the parent asked the worker to end."""
        return bool(self._words[_STOP])

    def request_recheck(self) -> int:
        """Ask for the binding to be looked at again; return the number of this question."""
        number: int = self._words[_RECHECK] + 1
        self._words[_RECHECK] = number
        return number

    @property
    def recheck_requested(self) -> int:
        """The number of the latest question."""
        return int(self._words[_RECHECK])

    @property
    def stats_taken(self) -> int:
        """How many statistics messages the parent has taken out of the channel."""
        return int(self._words[_STATS_TAKEN])

    @stats_taken.setter
    def stats_taken(self, count: int) -> None:
        self._words[_STATS_TAKEN] = count

    # The worker's words.

    def heartbeat(self) -> None:
        """Say that the worker is alive and moving."""
        self._words[_HEARTBEATS] += 1
        self._words[_HEARTBEAT_NS] = time.monotonic_ns()

    @property
    def heartbeats(self) -> int:
        """How many heartbeats there were."""
        return int(self._words[_HEARTBEATS])

    @property
    def heartbeat_ns(self) -> int:
        """``time.monotonic_ns()``, one clock for all processes, of the last heartbeat; 0 before the first."""
        return int(self._words[_HEARTBEAT_NS])

    @property
    def waiting(self) -> bool:
        """Whether the worker is blocked on purpose."""
        return int(self._words[_WAITING]) > 0

    def add_waiting(self, change: int) -> None:
        """Enter (+1) or leave (-1) a wait; waits may nest."""
        self._words[_WAITING] += change

    @property
    def wait_limit_s(self) -> float | None:
        """How long the wait of now may take before it counts as hanging; None without limit."""
        limit_ms = int(self._words[_WAIT_LIMIT_MS])
        return limit_ms / 1000 if limit_ms else None

    @wait_limit_s.setter
    def wait_limit_s(self, limit_s: float | None) -> None:
        self._words[_WAIT_LIMIT_MS] = 0 if limit_s is None else max(1, round(1000 * limit_s))

    @property
    def steps(self) -> int:
        """How many calls of ``step()`` have returned."""
        return int(self._words[_STEPS])

    def count_step(self) -> None:
        """Count one finished call of ``step()``."""
        self._words[_STEPS] += 1

    @property
    def stack_ready(self) -> bool:
        """Whether the worker's stack signal has its handler: before that the signal would kill."""
        return bool(self._words[_STACK_READY])

    def set_stack_ready(self) -> None:
        """Say that the stack signal may be sent."""
        self._words[_STACK_READY] = 1

    @property
    def phase(self) -> str:
        """What the worker is doing, in one word; "spawn" until its own code runs."""
        slot = int(self._words[_PHASE_SLOT])
        if slot == 0:
            return "spawn"
        start = (slot & 1) * _PHASE_BYTES
        raw = bytes(self._phases[start : start + _PHASE_BYTES])
        return raw.partition(b"\0")[0].decode("utf-8", "replace")

    def set_phase(self, name: str) -> None:
        """Write into the slot that no reader is pointed at, then point at it."""
        slot: int = self._words[_PHASE_SLOT] + 1
        raw = name.encode("utf-8")[: _PHASE_BYTES - 1].ljust(_PHASE_BYTES, b"\0")
        start = (slot & 1) * _PHASE_BYTES
        self._phases[start : start + _PHASE_BYTES] = raw
        self._words[_PHASE_SLOT] = slot
