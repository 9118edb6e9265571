"""What the chaos tests have in common: the budget of kills, the seed, and what must not be left."""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

from numa_collectors.metrics import process_tree

__all__ = ["TIMEOUT_S", "Tally", "nothing_left", "num_kills", "run_seed"]

# More than the suite allows a test: the waits within a run are bounds for a loaded machine.
TIMEOUT_S = 7200 if os.environ.get("CHAOS_KILLS") else 600


def num_kills(short: int, share: float) -> int:
    """Return how many kills an arm must deliver: ``short`` in the suite, ``share`` of ``CHAOS_KILLS`` where that is set."""
    total = os.environ.get("CHAOS_KILLS")
    return short if not total else max(short, int(int(total) * share))


def run_seed(arm: str, index: int) -> int:
    """Return the seed of an arm's run; ``CHAOS_SEED`` (default 0) makes other runs of all of them."""
    return random.Random(f"{os.environ.get('CHAOS_SEED', '0')} {arm} {index}").randrange(2**31)


class Tally:
    """Kills by the point at which they landed, and the runs that they landed in."""

    def __init__(self, arm: str) -> None:
        self.arm = arm
        self.points: collections.Counter[str] = collections.Counter()
        self.num_runs = 0
        self._begun_s = time.monotonic()

    @property
    def num_kills(self) -> int:
        return sum(self.points.values())

    @contextmanager
    def run(self) -> Iterator[int]:
        """One run: gives its seed, and says it when the run fails."""
        seed = run_seed(self.arm, self.num_runs)
        self.num_runs += 1
        try:
            yield seed
        except BaseException as error:
            words = f"{self.arm}, run {self.num_runs - 1}: seed {seed}, CHAOS_SEED={os.environ.get('CHAOS_SEED', '0')}"
            first = error
            while first.__context__ is not None:  # clearing up after an error may meet another
                first = first.__context__
            raise AssertionError(f"{words}: {type(first).__name__}: {first}") from error
        seconds = time.monotonic() - self._begun_s
        print(
            f"{self.arm}, run {self.num_runs - 1}: seed {seed}, {self.num_kills} kills so far, {seconds:.0f} s",
            flush=True,
        )

    def show(self) -> None:
        """Print the table of the arm."""
        seconds = time.monotonic() - self._begun_s
        print(f"\n{self.arm}: {self.num_kills} kills in {self.num_runs} runs, {seconds:.0f} s")
        for point, number in sorted(self.points.items(), key=lambda item: (-item[1], item[0])):
            print(f"{number:6d}  {point}")


@contextmanager
def nothing_left() -> Iterator[None]:
    """Compare processes and anonymous memory around one run; the suite's own fixture compares the rest around a test."""
    resource_tracker.ensure_running()  # one process for the life of this one, by design
    before = _present()
    yield
    left = [after - earlier for earlier, after in zip(before, _present(), strict=True)]
    assert left == [set(), set()], f"left behind, processes and shared memory: {left}"


def _present() -> tuple[set[int], set[str]]:
    descriptors = {path.name: _target(path) for path in Path("/proc/self/fd").iterdir()}
    return set(process_tree()), {f"{name} {target}" for name, target in descriptors.items() if "memfd:" in target}


def _target(descriptor: Path) -> str:
    return os.readlink(descriptor) if descriptor.is_symlink() else ""  # that of the listing itself is gone
