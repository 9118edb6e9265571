"""Whole runs of the trainer whose collectors and learner are killed at planned and at random points, and which finish."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing.resource_tracker as tracker
import random
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from numa_collectors.config import RunConfig
from numa_collectors.trainer import FanOutTrainer
from tests.chaos.arms import TIMEOUT_S, Tally, nothing_left, num_kills
from tests.chaos.collecting import ChaosCollector, planned_end
from tests.chaos.learning import ChaosLearner
from tests.chaos.payload import SCHEMA, WEIGHTS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux"),
    pytest.mark.timeout(TIMEOUT_S),
]


class _Killer(threading.Thread):
    """Kills one of this process's workers now and then, from the first slot that the learner took in; as ``kill -9`` does."""

    def __init__(self, rng: random.Random, books: Path, num_shots: int, learner_too: bool) -> None:
        super().__init__(name="killer")
        self.rng = rng
        self.books = books
        self.num_shots = num_shots
        self.learner_too = learner_too
        self.over = threading.Event()
        self.shot: list[str] = []

    def run(self) -> None:
        while not self.over.wait(0.02) and not (self.books.exists() and self.books.stat().st_size):
            continue
        while len(self.shot) < self.num_shots and not self.over.wait(self.rng.expovariate(4.0)):
            targets = list(self._targets())
            if targets:
                process, name = self.rng.choice(targets)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.shot.append(name)

    def _targets(self) -> Iterator[tuple[psutil.Process, str]]:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid == tracker._resource_tracker._pid or child.status() == psutil.STATUS_ZOMBIE:
                    continue
                name, command = child.name().partition("[")[0], child.cmdline()
                if name == "collector" or (name == "learner" and self.learner_too):
                    yield child, name
                elif "--multiprocessing-fork" in command:
                    yield child, "worker before it had a name"


class _Run:
    """One run with a configuration drawn from ``seed``."""

    def __init__(self, seed: int, tmp_path: Path, shots: int, generations: int, learner_deaths: int) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.generations = generations
        self.books, self.orders = tmp_path / "books", tmp_path / "orders"
        self.orders.mkdir(parents=True)
        for number in range(learner_deaths):
            (self.orders / str(number)).touch()
        number = rng.randint(1, 3)
        num_envs = number + rng.randint(0, 3)
        mode = rng.choice(["strict", "learner_bound"])
        ring_capacity = rng.choice([4, 8, 64])
        self.config = RunConfig(
            num_envs=num_envs,
            num_collectors=number,
            oversubscribe=True,
            binding=rng.choice(["auto", "off"]),
            total_env_steps=num_envs * 60 * (generations + shots),
            utd_mode=mode,
            num_updates=rng.choice([1, 3]),
            utd_max=20.0 if mode == "learner_bound" else None,
            learning_starts=rng.choice([0, 40]),
            ring_capacity=ring_capacity,
            max_lead_slots=rng.choice([None, 1, 4]),
            weight_publish_interval=rng.choice([1, 2, 7]),
            weight_poll_interval=rng.choice([1, 3]),
            max_ingest_per_iter=rng.choice([1, 8]),
            seed=seed % 2**32,
            run_dir=tmp_path / "run",
            learner_device="cpu",
            collector_inference_device="cpu",
            on_collector_exit="restart",
            on_learner_exit="restart",
            max_restarts=10_000,
            restart_backoff_s=0.0,
            start_timeout_s=600.0,
            checkpoint_interval_s=0.5,
            tensorboard=False,
            console="plain",
        )
        delays_s = tuple(rng.choice([0.001, 0.004]) for _ in range(number))
        self.trainer = FanOutTrainer(
            self.config,
            collector=partial(
                ChaosCollector, seed=seed, num_generations=generations, delays_s=delays_s, numbered=False
            ),
            learner=partial(ChaosLearner, books=self.books, orders=self.orders, seed=seed),
            schema=SCHEMA,
            weights=WEIGHTS,
        )
        self.killer = _Killer(rng, self.books, shots, learner_too=learner_deaths > 0)

    def run(self) -> str:
        """Run to the end; return what the console said."""
        said = io.StringIO()
        self.killer.start()
        try:
            with contextlib.redirect_stdout(said):
                result = self.trainer.run()
        finally:
            self.killer.over.set()
            self.killer.join()
        assert result.status == "finished", result
        assert result.env_steps >= self.config.planned_env_steps
        return said.getvalue()

    def check_books(self) -> int:
        """Check that every collector's slots came once and in order; return the number of learners that wrote the books.

        A learner that died had either released its last span or not, and then it is its successor's first.
        """
        last: dict[int, tuple[int, int, int]] = {}
        learners: list[int] = []
        for line in self.books.read_text().splitlines():
            learner, rank, first, end = json.loads(line)
            learners += [learner] if learner not in learners else []
            before, before_first, before_end = last.get(rank, (learner, 0, -1))
            expected = {before_end + 1} if before == learner else {before_first, before_end + 1}
            assert first in expected, (
                f"collector[{rank}]: slot {first} after {before_end}, learner {learner} after {before}"
            )
            last[rank] = (learner, first, end)
        slots = [end + 1 for _, _, end in last.values()]
        assert len(slots) == self.config.num_collectors
        if len(learners) == 1:
            assert slots == [self.config.slots_per_collector] * len(slots)
        return len(learners)


# A failure's first line, as the console shows it before it says that a restart follows.
_FAILURE = re.compile(
    r"^(learner|collector)\[(\d+)\] (.*?) \((?:generation (\d+), )?pid \d+, phase (\S+?),", re.MULTILINE
)


def _points(run: _Run, said: str) -> Iterator[str]:
    """Give the point of every death that the console told of; no other failure is allowed."""
    failures = _FAILURE.findall(said)
    assert len(failures) >= said.count("\nrestart "), said
    notes = run.books.with_name("publications")
    publications = notes.read_text().count("\n") if notes.exists() else 0
    for role, rank, how, generation, phase in failures:
        assert how == "died, killed by SIGKILL", said
        planned = None
        if role == "collector" and phase in ("step", "setup"):
            planned = planned_end(run.seed, int(rank), int(generation or 0), run.generations)
        elif role == "learner" and phase == "step" and publications:
            publications -= 1
            planned = ("within a publication of weights", 0)
        yield planned[0] if planned else f"{role}, from outside, in phase {phase}"
    assert not publications, "a learner that died within a publication went unnoticed"


def test_a_run_finishes_over_the_deaths_of_its_workers(tmp_path: Path) -> None:
    tally, wanted = Tally("trainer"), num_kills(short=8, share=0.15)
    while tally.num_kills < wanted:
        many = min(8, 1 + (wanted - tally.num_kills) // 8)
        with tally.run() as seed, nothing_left():
            run = _Run(
                seed, tmp_path / str(tally.num_runs), shots=many, generations=many, learner_deaths=min(2, many // 2)
            )
            said = run.run()
            run.check_books()
            tally.points.update(_points(run, said))
    tally.show()
