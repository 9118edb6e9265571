"""Collectors and learner in turn, in one process: for debugging, for determinism, and as the synchronous baseline."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from numa_collectors import checkpoint
from numa_collectors.checkpoint import Progress
from numa_collectors.collector import (
    CollectorFactory,
    CollectorLoop,
    CollectorOptions,
    build_loop,
)
from numa_collectors.learner import LearnerFactory
from numa_collectors.metrics import Sink
from numa_collectors.rings import RING_LAYOUTS, TransitionRing
from numa_collectors.seeds import seed_everything
from numa_collectors.snapshots import WeightSnapshot
from numa_collectors.trainer._files import RunFailedError, RunFiles, RunResult, RunStatus
from numa_collectors.trainer._observe import Observer
from numa_collectors.trainer._session import LearnerPlan, LearnerReport, LearnerSession
from numa_collectors.trainer._setup import RunSetup
from numa_collectors.worker import StopSignals

__all__ = ["InlineRun"]


class InlineRun:
    """One slot of every collector, then the updates that are due, and so on to the target.

    The same loops as in the workers, without waiting and without processes; the same seed gives the same bytes.
    """

    def __init__(
        self,
        setup: RunSetup,
        collector: CollectorFactory,
        learner: LearnerFactory,
        sinks: Sequence[Sink],
        signals: StopSignals,
    ) -> None:
        self._setup = setup
        self._collector = collector
        self._learner = learner
        self._sinks = sinks
        self._begun_s = time.monotonic()
        self._signals = signals
        self._session: LearnerSession | None = None
        self._loops: list[CollectorLoop] = []

    def run(self) -> RunResult:
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            rings, snapshots = self._regions(stack)
            files = RunFiles(self._setup.config, self._setup.ranks)
            stack.callback(files.close)
            observer = Observer(self._setup, files, self._sinks)
            stack.callback(observer.close)
            for message in self._setup.warnings:
                observer.console.message(message)
            try:
                session = self._build(files, observer, stack, rings, snapshots)
                status = self._turns(session, observer)
                report = session.end()
            except BaseException as error:
                # Frames of the traceback may hold views of the rings, which are about to be unmapped.
                traceback.clear_frames(error.__traceback__)
                text = f"{type(error).__name__}: {error}"
                # A second signal raises: the run was interrupted, and its last checkpoint is not of its end.
                ended: RunStatus = "failed" if self._signals.requested is None else "interrupted"
                result = self._result(ended, files, error=text)
                files.write_result(result)
                if isinstance(error, Exception):
                    raise RunFailedError(text, None, result) from error
                raise
            self._take_counters(session, observer)
            result = self._result(status, files, report)
            files.write_result(result)
            return result

    def _regions(self, stack: ExitStack) -> tuple[list[TransitionRing], list[WeightSnapshot]]:
        options = self._setup.options
        rings, snapshots = [], []
        for rank in range(options.num_collectors):
            ring = RING_LAYOUTS[options.ring_layout].create(
                self._setup.schema.with_leading(options.envs_of(rank)),
                capacity=options.ring_capacity,
                max_bytes=options.ring_max_bytes,
                max_lead_slots=options.max_lead_slots,
                name=f"ring-{rank}",
            )
            stack.callback(ring.close)
            snapshot = WeightSnapshot.create(self._setup.weights, name=f"weights-{rank}")
            stack.callback(snapshot.close)
            rings.append(ring)
            snapshots.append(snapshot)
        return rings, snapshots

    def _build(
        self,
        files: RunFiles,
        observer: Observer,
        stack: ExitStack,
        rings: Sequence[TransitionRing],
        snapshots: Sequence[WeightSnapshot],
    ) -> LearnerSession:
        """Make the learner, then the collectors by rank: a fixed order, since they draw from one generator."""
        setup, options = self._setup, self._setup.options
        ranks = setup.ranks
        seed_everything(
            setup.config.seed if ranks.rank == 0 else ranks.learner_seed(setup.config.seed, setup.generation)
        )
        plan = LearnerPlan(
            factory=self._learner,
            config=setup.config,
            weights=setup.weights,
            device=setup.learner_device,
            run_dir=files.run_dir,
            resume_from=setup.resume_from,
            start=setup.start,
            generation=setup.generation,
            fingerprints=setup.fingerprints,
            ranks=ranks,
        )
        session = LearnerSession(plan, rings, snapshots, say=observer.console.message)
        stack.callback(session.close)
        self._session = session
        loop_options = CollectorOptions(
            options.weight_poll_interval, options.quota_slots, options.check_finite, options.max_policy_lag
        )
        for rank, (ring, snapshot) in enumerate(zip(rings, snapshots, strict=True)):
            self._loops.append(build_loop(self._collector, options.context(rank), ring, snapshot, loop_options))
            stack.callback(_close, self._loops[-1], observer)
        observer.begin({})
        # The first counters are the base that the first log point's rates are differences to.
        self._take_counters(session, observer)
        return session

    def _turns(self, session: LearnerSession, observer: Observer) -> RunStatus:
        complete = False
        while not complete:
            if self._signals.requested is not None:
                return "interrupted"
            for loop in self._loops:
                loop.run_once(0)
            complete = session.round(0.0)
            while not complete and session.loop.governor.owed:
                complete = session.round(0.0)
            if observer.due:
                self._take_counters(session, observer)
                observer.tick()
        return "finished"

    def _take_counters(self, session: LearnerSession, observer: Observer) -> None:
        for loop in self._loops:
            observer.counters("collector", loop.ctx.rank, loop.stats(), loop.ctx.generation)
        observer.counters("learner", 0, session.stats(), 0)

    def _result(
        self, status: RunStatus, files: RunFiles, report: LearnerReport | None = None, error: str | None = None
    ) -> RunResult:
        progress: Progress = self._setup.start if self._session is None else self._session.progress
        return RunResult(
            status=status,
            env_steps=progress.env_steps,
            updates=progress.updates,
            weight_version=progress.weight_version,
            wall_s=time.monotonic() - self._begun_s,
            run_dir=files.run_dir,
            checkpoint=report.checkpoint if report else checkpoint.latest(files.run_dir),
            signal=self._signals.requested,
            discarded_slots=report.discarded_slots if report else 0,
            placement={},
            error=error or (report.error if report else None),
        )


def _close(loop: CollectorLoop, observer: Observer) -> None:
    """Close the environments; what they raise is said, as for a worker, and does not undo what the run has done."""
    try:
        loop.close()
    except Exception as error:  # noqa: BLE001 - any user's code; it is said below
        observer.console.message(f"{loop.ctx.name}: {error}")
