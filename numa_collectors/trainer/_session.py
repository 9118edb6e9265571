"""One session of the learner: built from a picklable plan, in the learner's process or inline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numa_collectors import checkpoint
from numa_collectors.checkpoint import Progress
from numa_collectors.config import RunConfig
from numa_collectors.errors import CheckpointError, ConfigError
from numa_collectors.exchange import Exchange
from numa_collectors.learner import DeviceIntake, Learner, LearnerContext, LearnerFactory, WeightStager, use_device
from numa_collectors.rings import TransitionRing
from numa_collectors.snapshots import WeightSnapshot, WeightSpec
from numa_collectors.trainer._governor import Governor
from numa_collectors.trainer._loop import LearnerLoop, LoopLimits
from numa_collectors.trainer._ranks import Ranks

__all__ = ["LearnerPlan", "LearnerReport", "LearnerSession"]


@dataclass(frozen=True)
class LearnerPlan:
    """All that the learner's process needs to know; picklable."""

    factory: LearnerFactory
    config: RunConfig
    weights: WeightSpec
    device: str
    run_dir: Path
    cpus: tuple[int, ...] | None = None
    node: int | None = None
    resume_from: Path | None = None
    start: Progress = field(default_factory=lambda: Progress(env_steps=0, updates=0))
    generation: int = 0
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def seed(self) -> int:
        """The seed of this rank's learner."""
        return self.ranks.learner_seed(self.config.seed, self.generation)

    @property
    def num_envs(self) -> tuple[int, ...]:
        """Environments of each collector, by rank."""
        return tuple(self.config.envs_of(rank) for rank in range(self.config.num_collectors))


@dataclass(frozen=True)
class LearnerReport:
    """What the learner says at its end."""

    progress: Progress
    complete: bool
    checkpoint: Path | None
    discarded_slots: int
    error: str | None = None


class LearnerSession:
    """The learner with its loop, its checkpoints and its counters.

    ``excuse`` returns a context for work that may take longer than any heartbeat: compiling at the first update, saving.
    """

    def __init__(
        self,
        plan: LearnerPlan,
        rings: Sequence[TransitionRing],
        snapshots: Sequence[WeightSnapshot],
        *,
        excuse: Callable[[], AbstractContextManager[object]] = nullcontext,
        say: Callable[[str], None] = print,
    ) -> None:
        self._plan = plan
        self._rings = rings
        self._excuse = excuse
        self._say = say
        config = plan.config
        use_device(plan.device)
        self.learner = self._build()
        self.exchange = Exchange(rings, snapshots, first_version=plan.start.weight_version)
        self._intake = DeviceIntake(self.exchange, plan.device)
        self.loop = LearnerLoop(
            self.learner,
            self.exchange,
            self._governor(),
            intake=self._intake,
            stager=WeightStager(plan.weights, plan.device),
            num_envs=plan.num_envs,
            limits=LoopLimits(
                target_env_steps=config.planned_env_steps - plan.start.env_steps,
                # Slot by slot, strict makes the updates in the order of the synchronous algorithm.
                max_ingest_slots=1 if config.utd_mode == "strict" else config.max_ingest_per_iter,
                publish_interval=config.weight_publish_interval,
            ),
        )
        self._saved: Progress | None = None
        self._save_failed = False
        self._next_save_s = time.monotonic() + (config.checkpoint_interval_s or float("inf"))
        self.loop.publish_now()

    def _build(self) -> Learner:
        plan = self._plan
        learner = plan.factory(
            LearnerContext(
                device=plan.device,
                num_collectors=plan.config.num_collectors,
                num_envs=plan.num_envs,
                seed=plan.seed,
                cpus=plan.cpus,
                node=plan.node,
                resumed=plan.resume_from is not None,
                rank=plan.ranks.rank,
                world_size=plan.ranks.world_size,
            )
        )
        if not isinstance(learner, Learner):
            raise ConfigError(
                f"expected the learner factory to return an object with ingest, update, weights, state_dict and "
                f"load_state_dict, got {type(learner).__name__}"
            )
        if plan.resume_from is not None:
            loaded = checkpoint.load(plan.resume_from)
            try:
                learner.load_state_dict(loaded.state["learner"])
            except Exception as error:
                raise CheckpointError(
                    f"expected a learner that takes the state of {loaded.path}, got {type(error).__name__}: {error}; resume "
                    "with the learner and the options that the run was made with, or start a new run"
                ) from error
            # The generators' states are rank 0's: with them, all ranks would draw the same samples.
            if plan.ranks.is_main:
                checkpoint.restore_rng(loaded.state["rng"])
        return learner

    def _governor(self) -> Governor:
        config = self._plan.config
        # What the buffer holds already (a saved replay memory, say) counts towards the warm-up.
        held = int(getattr(self.learner, "num_transitions", 0))
        warm_up = max(0, config.learning_starts - held)
        if config.utd_mode == "strict":
            return Governor.strict(num_updates=config.num_updates, num_envs=config.num_envs, warm_up=warm_up)
        return Governor.learner_bound(
            num_updates=config.num_updates, warm_up=warm_up, utd_min=config.utd_min, utd_max=config.utd_max
        )

    # rounds

    def round(self, wait_s: float) -> bool:
        """One round of the loop, and a checkpoint where one is due; returns whether the run is complete."""
        # A first update may compile for minutes.
        with self._excuse() if self.loop.counters.updates == 0 else nullcontext():
            complete = self.loop.step(wait_s)
        if not complete and time.monotonic() >= self._next_save_s:
            self._next_save_s = time.monotonic() + (self._plan.config.checkpoint_interval_s or float("inf"))
            self._save_or_say()
        return complete

    def end(self) -> LearnerReport:
        """Take in what is still there, save the final checkpoint, and report.  Publishes the last weights."""
        if not self.loop.complete:
            self.loop.ingest_rest()
        discarded = sum(consumer.fill for consumer in self.exchange.consumers)
        self.loop.publish_now()
        error = self._save_or_say(last=True)
        return LearnerReport(self.progress, self.loop.complete, checkpoint.latest(self._plan.run_dir), discarded, error)

    @property
    def progress(self) -> Progress:
        """The run's counts, those before a resume included."""
        start, counters = self._plan.start, self.loop.counters
        return Progress(
            env_steps=start.env_steps + counters.env_steps,
            updates=start.updates + counters.updates,
            weight_version=self.exchange.version,
            collectors={
                rank: {
                    "slots": slots,
                    "num_envs": self._plan.num_envs[rank],
                    "generation": max(self._plan.generation, self.loop.generations[rank]),
                }
                for rank, slots in enumerate(counters.slots)
            },
        )

    def _save_or_say(self, *, last: bool = False) -> str | None:
        """Save unless nothing changed; a failure leaves the last checkpoint standing and the run going, and is returned.

        It is said once: the first time, or ``last`` if that is the first.
        """
        progress = self.progress
        # One checkpoint serves all ranks, whose counts and weights are the same: that of rank 0.
        if not self._plan.ranks.is_main or self._saved == progress:
            return None
        try:
            with self._excuse():
                self.save()
        except CheckpointError as error:
            if not self._save_failed:
                goes_on = "" if last else "; the run goes on and tries again, further failures are not reported"
                self._say(f"{error}{goes_on}")
            self._save_failed = True
            return str(error)
        self._save_failed = False
        self._saved = progress
        return None

    def save(self) -> Path:
        """Write a checkpoint of now and drop the oldest beyond ``keep_checkpoints``."""
        config = self._plan.config
        path = checkpoint.save(
            self._plan.run_dir / "checkpoints",
            {"learner": self.learner.state_dict(), "rng": checkpoint.rng_state()},
            self.progress,
            config=config.model_dump(mode="json"),
            fingerprints=self._plan.fingerprints,
        )
        checkpoint.keep_last(self._plan.run_dir, config.keep_checkpoints)
        return path

    def stats(self) -> dict[str, Any]:
        """Return the cumulative counters of :mod:`numa_collectors.metrics.counters`."""
        counters, progress, exchange = self.loop.counters, self.progress, self.exchange
        train: Mapping[str, float] = self.loop.train_metrics
        return {
            "time_ns": time.monotonic_ns(),
            "env_steps": progress.env_steps,
            "updates": progress.updates,
            "busy_ns": counters.busy_ns,
            "ingest_ns": counters.ingest_ns,
            "publish_ns": exchange.publish_ns,
            "wait_data_ns": counters.wait_data_ns,
            "publishes": exchange.num_publishes,
            "publish_skips": counters.publish_skips,
            "bytes_ingested": counters.bytes_ingested,
            "weight_version": exchange.version,
            "ring_fill": {rank: ring.fill / ring.max_lead_slots for rank, ring in enumerate(self._rings)},
            "lag": {rank: lag.counts() for rank, lag in enumerate(exchange.lags)},
            "train": {name: float(value) for name, value in train.items()},
        }

    def close(self, *, for_good: bool = True) -> None:
        """Let go of the rings' memory; ``for_good`` tells the producers that nobody will ever read any more."""
        self._intake.close()
        if for_good:
            self.exchange.close()
