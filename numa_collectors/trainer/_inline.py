"""Collectors and learner in turn, in one process: for debugging, for determinism, and as the synchronous baseline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from numa_collectors.collector import (
    CollectorContext,
    CollectorFactory,
    CollectorLoop,
    CollectorOptions,
    build_loop,
)
from numa_collectors.learner import LearnerFactory
from numa_collectors.metrics import Sink
from numa_collectors.rings import TransitionRing
from numa_collectors.seeds import seed_everything
from numa_collectors.snapshots import WeightSnapshot
from numa_collectors.trainer._files import RunFailedError, RunFiles, RunResult, RunStatus
from numa_collectors.trainer._observe import Observer
from numa_collectors.trainer._session import LearnerPlan, LearnerReport, LearnerSession
from numa_collectors.trainer._setup import RunSetup
from numa_collectors.worker import StopSignals

__all__ = ["run_inline"]


def run_inline(
    setup: RunSetup, collector: CollectorFactory, learner: LearnerFactory, sinks: Sequence[Sink]
) -> RunResult:
    """Run to the target: one slot of every collector, then the updates that are due, and so on.

    The same loops as in the workers, without waiting and without processes; the same seed gives the same bytes.
    """
    begun_s = time.monotonic()
    config, options = setup.config, setup.options
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        rings, snapshots = _regions(setup, stack)
        files = RunFiles(config)
        stack.callback(files.close)
        observer = Observer(setup, files, sinks)
        stack.callback(observer.close)
        for message in setup.warnings:
            observer.console.message(message)
        seed_everything(config.seed)
        plan = LearnerPlan(
            factory=learner,
            config=config,
            weights=setup.weights,
            device=setup.learner_device,
            run_dir=files.run_dir,
            resume_from=setup.resume_from,
            start=setup.start,
            generation=setup.generation,
            fingerprints=setup.fingerprints,
        )
        session = LearnerSession(plan, rings, snapshots, say=observer.console.message)
        stack.callback(session.close)
        loops: list[CollectorLoop] = []
        for rank, (ring, snapshot) in enumerate(zip(rings, snapshots, strict=True)):
            context = CollectorContext.for_rank(
                rank,
                num_collectors=options.num_collectors,
                total_num_envs=options.num_envs,
                run_seed=options.seed,
                generation=options.generation,
                device=options.device,
                learning_starts_slots=options.learning_starts_slots,
            )
            loop_options = CollectorOptions(
                options.weight_poll_interval, options.quota_slots, options.check_finite, options.max_policy_lag
            )
            loops.append(build_loop(collector, context, ring, snapshot, loop_options))
            stack.callback(loops[-1].close)
        observer.begin({})
        try:
            status = _turns(loops, session, observer, signals)
        except Exception as error:
            result = _result("failed", session, files, begun_s, signals, None, str(error))
            files.write_result(result)
            raise RunFailedError(f"{type(error).__name__}: {error}", None, result) from error
        report = session.end(complete=status == "finished")
        _take_counters(loops, session, observer)
        result = _result(status, session, files, begun_s, signals, report, None)
        files.write_result(result)
        return result


def _regions(setup: RunSetup, stack: ExitStack) -> tuple[list[TransitionRing], list[WeightSnapshot]]:
    options = setup.options
    rings, snapshots = [], []
    for rank in range(options.num_collectors):
        ring = TransitionRing.create(
            setup.schema.with_leading(options.envs_of(rank)),
            capacity=options.ring_capacity,
            max_bytes=options.ring_max_bytes,
            max_lead_slots=options.max_lead_slots,
            name=f"ring-{rank}",
        )
        stack.callback(ring.close)
        snapshot = WeightSnapshot.create(setup.weights, name=f"weights-{rank}")
        stack.callback(snapshot.close)
        rings.append(ring)
        snapshots.append(snapshot)
    return rings, snapshots


def _turns(loops: list[CollectorLoop], session: LearnerSession, observer: Observer, signals: StopSignals) -> RunStatus:
    complete = False
    while not complete:
        if signals.requested is not None:
            return "interrupted"
        for loop in loops:
            loop.run_once(0)
        complete = session.round(0.0)
        while not complete and session.loop.governor.owed:
            complete = session.round(0.0)
        if observer.due:
            _take_counters(loops, session, observer)
            observer.tick()
    return "finished"


def _take_counters(loops: list[CollectorLoop], session: LearnerSession, observer: Observer) -> None:
    for loop in loops:
        observer.counters("collector", loop.ctx.rank, loop.stats(), loop.ctx.generation)
    observer.counters("learner", 0, session.stats(), 0)


def _result(
    status: RunStatus,
    session: LearnerSession,
    files: RunFiles,
    begun_s: float,
    signals: StopSignals,
    report: LearnerReport | None,
    error: str | None,
) -> RunResult:
    progress = session.progress
    return RunResult(
        status=status,
        env_steps=progress.env_steps,
        updates=progress.updates,
        weight_version=progress.weight_version,
        wall_s=time.monotonic() - begun_s,
        run_dir=files.run_dir,
        checkpoint=report.checkpoint if report else None,
        signal=signals.requested,
        discarded_slots=report.discarded_slots if report else 0,
        placement={},
        error=error,
    )
