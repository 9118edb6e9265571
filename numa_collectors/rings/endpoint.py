"""What both ends of a ring have in common: words, claim, sleeping and waking."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numa_collectors._futex import full_fence, futex_wait, futex_wake, make_fence
from numa_collectors._identity import C_GENERATION, C_LIVE, C_PID, Gone, claim_holder, guard_fork, write_claim
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.rings.schema import Schema

__all__ = ["C_GENERATION", "C_LIVE", "C_PID", "Doorbell", "Endpoint", "RingMemory"]

NUM_SPINS = 400
"""Looks at the cursor before sleeping: 30 to 50 microseconds, about what a futex wake-up costs."""

MAX_SLEEP_S = 0.25
"""Longest sleep before the condition is looked at again, whatever the time limit."""

_LOW_WORD_BYTES = 0 if sys.byteorder == "little" else 4

AWAKE, ASLEEP, ON_BELL = 0, 1, 2
"""Values of an asleep word: nobody sleeps, the other end sleeps on this word, the other end sleeps on the bell."""


class Doorbell:
    """A word that many producers clear to wake a consumer that sleeps on all of its rings at once."""

    def __init__(self, data: memoryview, address: int) -> None:
        self._words = data[:16].cast("q")
        self._address = address + _LOW_WORD_BYTES

    @property
    def identity(self) -> int:
        """The same number for every mapping of one bell."""
        return int(self._words[1])

    def found(self) -> None:
        """Give a fresh bell its identity."""
        self._words[1] = int.from_bytes(os.urandom(7), "little") + 1

    def arm(self, word: int) -> None:
        """Say ASLEEP or AWAKE."""
        self._words[0] = word

    def sleep(self, seconds: float) -> bool:
        """Sleep until the bell rings; see :func:`futex_wait`."""
        return futex_wait(self._address, ASLEEP, seconds)

    def ring(self) -> None:
        """Wake whoever sleeps, or is about to, on the bell."""
        self._words[0] = AWAKE
        futex_wake(self._address)

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()


@dataclass
class RingMemory:
    """A mapped ring: ``data`` is its writable memory, beginning at ``address``."""

    name: str
    schema: Schema
    capacity: int
    limit: int
    data: memoryview
    address: int
    bell: Doorbell | None = None
    words: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.words = self.data[: len(self.data) // 8 * 8].cast("q")

    def wake(self, asleep: int) -> None:
        """Wake whoever sleeps, or is about to, on the ``asleep`` word.

        The word is cleared before the call: a sleeper that is not yet in the kernel finds it changed and does not
        sleep.
        """
        on_bell = self.words[asleep] == ON_BELL
        self.words[asleep] = AWAKE
        if on_bell and self.bell is not None:
            self.bell.ring()
        else:
            futex_wake(self.futex_address(asleep))

    def futex_address(self, word: int) -> int:
        """Address of the 32 low bits of a word."""
        return self.address + 8 * word + _LOW_WORD_BYTES

    def claimed_by(self, claim: int) -> int | None:
        """Pid of the live process that holds ``claim``, or None."""
        return claim_holder(self.words, claim)

    def release(self) -> None:
        """Let go of the memory, so that it can be unmapped."""
        self.words.release()
        if self.bell is not None:
            self.bell.release()


class Endpoint:
    """One end of a ring.  Belongs to one thread of one process; refused in a forked child."""

    _side = "end"
    _cursor = 0
    _claim = 0
    _asleep = 0
    _peer_asleep = 0
    _peer_claim = 0

    def __init__(self, memory: RingMemory, generation: int) -> None:
        self._memory = memory
        self._words: Any = memory.words
        self._begin_fence, self._end_fence = make_fence()
        self._open = True
        self._last_position = 0
        self._acquire_claim(generation)
        guard_fork(self)

    def _acquire_claim(self, generation: int) -> None:
        """Become the only holder of this end."""
        holder = self._memory.claimed_by(self._claim)
        if holder is not None:
            raise NumaCollectorsError(
                f"ring {self._memory.name!r} has a live {self._side} already (pid {holder}); a ring has one "
                f"{self._side} at a time, close that one or wait for its death"
            )
        write_claim(self._memory.words, self._claim, generation)
        # The predecessor may have died between clearing this word and waking: whoever sleeps at the other side looks
        # again.
        self._memory.wake(self._peer_asleep)

    def _position(self) -> int:
        """This end's cursor; what it was where the memory is gone."""
        return int(self._words[self._cursor]) if self._open else self._last_position

    def _after_fork(self) -> None:
        self._last_position = self._position()
        self._words = Gone(
            f"this {self._side} of ring {self._memory.name!r} belongs to the parent process; a ring's ends do not "
            "survive fork, start processes by spawn and open the end there"
        )
        self._open = False

    @property
    def peer_running(self) -> bool:
        """Whether the process at the other side holds its end and runs (reads procfs)."""
        return self._memory.claimed_by(self._peer_claim) is not None

    def _sleep_until(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Spin shortly, then sleep until ``ready()`` or until the time is over; returns the last ``ready()``."""
        if ready():
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        for _ in range(NUM_SPINS):
            if ready():
                return True
        block = functools.partial(futex_wait, self._memory.futex_address(self._asleep), ASLEEP)
        return sleep_on(functools.partial(self._words.__setitem__, self._asleep), block, ready, timeout_s)

    def _let_go(self) -> None:
        """Give up the claim and forget the memory."""
        self._last_position = self._position()
        self._words[self._claim + C_LIVE] = 0
        self._words = Gone(f"this {self._side} of ring {self._memory.name!r} is closed")
        self._open = False


def sleep_on(
    arm: Callable[[int], None],
    block: Callable[[float], object],
    ready: Callable[[], bool],
    timeout_s: float | None,
) -> bool:
    """Sleep until ``ready()``; ``arm(word)`` says ASLEEP or AWAKE to every peer, ``block(seconds)`` sleeps once.

    The order is the guarantee: say "asleep", fence, look again, and only then sleep, in one step with the kernel's
    check that nobody has cleared the word.  A peer publishes, fences, and then looks at the word: one of the two sees
    the other.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        remaining_s = MAX_SLEEP_S if deadline is None else min(deadline - time.monotonic(), MAX_SLEEP_S)
        if remaining_s <= 0:
            return ready()
        try:
            arm(ASLEEP)
            full_fence()
            if ready():
                return True
            block(remaining_s)
        finally:
            arm(AWAKE)
        if ready():
            return True
