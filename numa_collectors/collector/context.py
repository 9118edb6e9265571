"""What a collector is: its context, its base class, the policy protocol, and the errors that name the culprit.

A *collector factory* is any picklable callable ``(ctx: CollectorContext) -> Collector``.  It is called in the
collector's own process, after that process was bound to its CPUs and node.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from numa_collectors.errors import ConfigError, NumaCollectorsError
from numa_collectors.seeds import collector_seed, env_seeds

__all__ = [
    "Collector",
    "CollectorContext",
    "CollectorError",
    "CollectorFactory",
    "Episode",
    "NonFiniteError",
    "Policy",
    "StageTimer",
    "check_picklable",
    "shard",
]


class CollectorError(NumaCollectorsError):
    """An environment, a policy or a collector did something that cannot go into a buffer.

    ``rank``: the collector; ``env``: index over all environments of the run, or ``None`` where it cannot be told;
    ``step``: the collector's step; ``field``: the field of the slot, or ``None``.
    """

    def __init__(
        self, message: str, *, rank: int, env: int | None = None, step: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank, self.env, self.step, self.field = rank, env, step, field

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.rank, self.env, self.step, self.field))


def _rebuild(
    cls: type[CollectorError], message: str, rank: int, env: int | None, step: int | None, field: str | None
) -> CollectorError:
    return cls(message, rank=rank, env=env, step=step, field=field)


class NonFiniteError(CollectorError):
    """A NaN or an infinity in a floating-point field of a slot, caught before the slot was committed."""


class StageTimer:
    """Adds the time between entering and leaving to a stage's total, in ns; stages may nest, one within itself not."""

    __slots__ = ("_begin_ns", "num_calls", "total_ns")

    def __init__(self) -> None:
        self.total_ns = 0
        self.num_calls = 0
        self._begin_ns = 0

    def __enter__(self) -> StageTimer:
        self._begin_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.total_ns += time.perf_counter_ns() - self._begin_ns
        self.num_calls += 1


def shard(total_num_envs: int, num_collectors: int, rank: int) -> tuple[int, int]:
    """Return ``(env_offset, num_envs)`` of collector ``rank``: 7 over 3 is 3/2/2, and totals are exact."""
    if not 0 <= rank < num_collectors <= total_num_envs:
        raise ConfigError(
            f"cannot give collector {rank} of {num_collectors} a share of num_envs={total_num_envs}: expected "
            "0 <= rank < num_collectors <= num_envs; raise num_envs or lower num_collectors"
        )
    base, extra = divmod(total_num_envs, num_collectors)
    return rank * base + min(rank, extra), base + (rank < extra)


@dataclass(frozen=True)
class CollectorContext:
    """What a collector is told about itself.  Build it with :meth:`for_rank`, or field by field.

    rank, num_collectors: this collector and how many there are, counted over all learners of a run under ``torchrun``.
    num_envs, env_offset, total_num_envs: this collector steps environments ``env_offset .. env_offset + num_envs - 1``.
    seed: the collector's **own** seed (:func:`numa_collectors.seeds.collector_seed`), never the same for two
        collectors.
    generation: 0 at first, one more after each restart.
    device: where the policy should infer (``"cpu"``, ``"cuda:0"``); the library itself does not use it.
    cpus, node: what the process is bound to; ``None`` where it is not bound.  Give ``cpus`` to environments that own a
        thread pool: threads of a pool inherit the worker's CPUs, but pools size themselves by the whole machine.
    learning_starts_slots: slots of this collector, counted over generations, in which to act at random.
    start_slot: slots that earlier generations of this collector committed.
    run_seed: the seed of the whole run, from which :meth:`restarted` derives; ``None``: derive from ``seed``.
    """

    rank: int = 0
    num_collectors: int = 1
    num_envs: int = 1
    env_offset: int = 0
    total_num_envs: int = 1
    seed: int = 0
    generation: int = 0
    device: str = "cpu"
    cpus: tuple[int, ...] | None = None
    node: int | None = None
    learning_starts_slots: int = 0
    start_slot: int = 0
    run_seed: int | None = None
    timers: dict[str, StageTimer] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def for_rank(
        cls,
        rank: int,
        *,
        num_collectors: int,
        total_num_envs: int,
        run_seed: int,
        learner: tuple[int, int] = (0, 1),
        **fields: Any,
    ) -> CollectorContext:
        """Return the context of one collector of a run: its shard of the environments and its own seed.

        ``rank``, ``num_collectors`` and ``total_num_envs`` count those of one learner; ``learner`` is ``(rank, number)``
        of that learner.  The context's own count over all learners, learner 0 first.
        """
        env_offset, num_envs = shard(total_num_envs, num_collectors, rank)
        learner_rank, num_learners = learner
        rank += learner_rank * num_collectors
        return cls(
            rank=rank,
            num_collectors=num_learners * num_collectors,
            num_envs=num_envs,
            env_offset=learner_rank * total_num_envs + env_offset,
            total_num_envs=num_learners * total_num_envs,
            seed=collector_seed(run_seed, rank, fields.get("generation", 0)),
            run_seed=run_seed,
            **fields,
        )

    @property
    def name(self) -> str:
        return f"collector[{self.rank}]"

    def restarted(self, generation: int, *, start_slot: int = 0) -> CollectorContext:
        """Return the context of another generation: a fresh seed (generation 0: as it was) and fresh timers."""
        if generation == self.generation:
            return replace(self, start_slot=start_slot)
        base = self.seed if self.run_seed is None else self.run_seed
        return replace(
            self, generation=generation, start_slot=start_slot, seed=collector_seed(base, self.rank, generation)
        )

    def env_seeds(self, *, bits: int = 63) -> list[int]:
        """Return one reset seed below ``2**bits`` for each environment of the shard (31 for simulators that take an
        int32).

        Collector 0 of generation 0 gives its first environment the run's seed itself, so that a run with one
        environment is seeded as without the library; the others have streams of their own, since ``seed + i`` would
        collide with the environments of the run with the next seed.
        """
        base = self.seed if self.run_seed is None else self.run_seed
        seeds = env_seeds(base, self.rank, self.num_envs, self.generation, bits=bits)
        if self.rank == 0 and self.generation == 0:
            seeds[0] = base
        return seeds

    def timer(self, stage: str) -> StageTimer:
        """Return the stage's timer, to be used as ``with ctx.timer("env_step"):``; reported as ``<stage>_ns``."""
        timer = self.timers.get(stage)
        if timer is None:
            timer = self.timers[stage] = StageTimer()
        return timer

    def describe(self, row: int | None, step: int | None, name: str | None) -> str:
        """Return the words that name a place in the data, e.g.
        ``collector[1], environment 9 (row 2), step 17, field 'obs'``."""
        words = [self.name]
        if row is not None:
            words.append(f"environment {self.env_offset + row} (row {row} of its {self.num_envs})")
        if step is not None:
            words.append(f"step {step}")
        if name is not None:
            words.append(f"field {name!r}")
        return ", ".join(words)

    def error(
        self, message: str, *, row: int | None = None, step: int | None = None, field: str | None = None
    ) -> CollectorError:
        """Return a :class:`CollectorError` that names this collector, the environment in ``row``, the step and the
        field."""
        env = None if row is None else self.env_offset + row
        text = f"{self.describe(row, step, field)}: {message}"
        return CollectorError(text, rank=self.rank, env=env, step=step, field=field)


@dataclass(frozen=True)
class Episode:
    """A finished episode: the sum of its rewards as the slots hold them, and its number of steps."""

    return_: float
    length: int


class Collector(ABC):
    """Steps the environments of one shard.  Not thread-safe; lives in one process.

    A slot maps each field of the schema to a writable array ``(num_envs, *shape)`` in shared memory.  The arrays
    belong to the ring again when :meth:`collect` returns: never keep them.
    """

    @abstractmethod
    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        """Take one step in every environment and write one transition of each into ``slot``, every field of every row.

        The observation that is acted on must be in the slot **before** the environment steps: environments reuse their
        buffers in place, and what is copied afterwards is the next observation.
        """

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:  # noqa: B027 - optional
        """Take over new weights: arrays private to this process, valid until the next call; copy what is kept."""

    def drain_episodes(self) -> list[Episode]:
        """Return the episodes that ended since the last call."""
        return []

    def sums(self) -> Mapping[str, float]:
        """Return, by tag, sums over all slots so far; a log point has the mean over the slots of its interval.

        For scalars of the environments that are no stage and no return: ``"reward/upright"``, ``"metrics/height"``.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - not every collector has something to close
        """Close the environments; called once, also after an error."""


CollectorFactory = Callable[[CollectorContext], Collector]


@runtime_checkable
class Policy(Protocol):
    """What chooses actions in :class:`~numa_collectors.collector.GymCollector`."""

    def act(self, obs: Any) -> np.ndarray:
        """Return actions ``(num_envs, *action_shape)`` for observations ``(num_envs, *obs_shape)``.

        ``obs`` is one array, or for dict and tuple spaces a mapping from the leaf's path (``"camera"``,
        ``"arm/joints"``,
        ``"0"``) to its array, in the dtypes of the schema.  It is a private copy that the next call overwrites.
        Actions are in the **environment's** scale (a Box's own bounds, not -1..1) and go to it as they are: a policy
        that squashes must scale, and the buffer holds what the environment was given.
        """

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        """Take over new weights; see :meth:`Collector.load_weights`."""


def check_picklable(obj: object, what: str) -> None:
    """Raise :class:`ConfigError` unless ``obj`` can be sent to a spawned process; call it before any process starts.

    Also refused: a function or class defined at an interactive prompt, which pickles here but cannot be imported there.
    """
    try:
        ForkingPickler.dumps(obj)
    except (PicklingError, AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{what} cannot be sent to a worker process: expected something picklable, got {obj!r} ({error}); define "
            "it at the top level of a module (not a lambda, a function inside a function, or an object that holds an "
            "open environment), and bind its arguments with functools.partial"
        ) from error
    import __main__

    if getattr(obj, "__module__", None) == "__main__" and not hasattr(__main__, "__file__"):
        raise ConfigError(
            f"{what} cannot be sent to a worker process: {obj!r} was defined at an interactive prompt, and a spawned "
            "process imports it by name; put it into a .py file and import it from there"
        )
