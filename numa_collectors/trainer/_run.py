"""The whole run: placement, processes, supervision, shutdown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from numa_collectors import checkpoint
from numa_collectors.binding import BindReport
from numa_collectors.collector import CollectorFactory
from numa_collectors.config import RunConfig
from numa_collectors.errors import NumaCollectorsError, WorkerFailedError
from numa_collectors.learner import LearnerFactory
from numa_collectors.metrics import Sink
from numa_collectors.pool import CollectorPool, bind_request
from numa_collectors.rings import Schema
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer._explain import explain
from numa_collectors.trainer._files import RunFailedError, RunFiles, RunResult, RunStatus
from numa_collectors.trainer._inline import InlineRun
from numa_collectors.trainer._observe import Observer, placement_text
from numa_collectors.trainer._session import LearnerPlan, LearnerReport
from numa_collectors.trainer._setup import RunSetup, prepare
from numa_collectors.trainer._worker import LearnerWorker
from numa_collectors.worker import PinnedWorker, StopSignals, WorkerFailure

__all__ = ["FanOutTrainer"]

_POLL_S = 0.1


class FanOutTrainer:
    """N collectors, one learner, one run.

    ``collector`` and ``learner`` are picklable factories, ``(CollectorContext) -> Collector`` and
    ``(LearnerContext) -> Learner``; ``schema`` names the fields of one transition of **one** environment, ``weights``
    the tensors that the collectors need.

    Everything that can be checked is checked here: a bad configuration raises before any process, file or directory exists.

    Under ``torchrun`` each rank makes one, with its own collectors and learner; rank 0 alone gives points to ``sinks``.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        collector: CollectorFactory,
        learner: LearnerFactory,
        schema: Schema,
        weights: WeightSpec,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._collector = collector
        self._learner = learner
        self._sinks = tuple(sinks)
        self._setup: RunSetup = prepare(config, collector, learner, schema, weights)
        self._signals = StopSignals()

    @property
    def setup(self) -> RunSetup:
        """What was decided: placement, devices, where the run starts."""
        return self._setup

    def explain(self) -> str:
        """Return the plan in words: who runs where and why, memory a node, thread caps, seeds, risks.  Starts nothing."""
        return explain(self._setup)

    def run(self) -> RunResult:
        """Run to the target, or until Ctrl-C or SIGTERM (the result then says ``interrupted``).

        Raises :class:`RunFailedError` (a ``WorkerFailedError``) with the first worker that failed and its traceback; its
        ``result`` says how far the run came.  Nothing is left behind in any case.

        Signals reach Python's main thread only.  In another thread, call :meth:`request_stop` from the main one;
        ``StopSignals(trainer.request_stop)`` around its wait does so at the first signal.
        """
        kind = InlineRun if self._setup.config.inline else _Run
        try:
            return kind(self._setup, self._collector, self._learner, self._sinks, self._signals).run()
        finally:
            self._signals = StopSignals()

    def request_stop(self, signal_name: str = "SIGINT") -> None:
        """Have the run end as after the first Ctrl-C, or the first SIGTERM: with a final checkpoint and that exit code.

        From any thread, also from a signal handler; returns at once.  Before :meth:`run` it ends the next run at its start.
        """
        self._signals.request(signal_name)


class _Run:
    """One use of a trainer: the resources of a run, and its supervision."""

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
        self._learner_factory = learner
        self._sinks = sinks
        self._signals = signals
        self._reports: dict[str, BindReport] = {}
        self._begun_s = time.monotonic()
        self._messages: list[str] = list(setup.warnings)
        self._observer: Observer | None = None
        self._late: list[WorkerFailure] = []
        self._pool: CollectorPool | None = None

    def run(self) -> RunResult:
        with ExitStack() as stack:
            stack.enter_context(self._signals)
            # The pool first: it refuses what does not fit into memory, and then no directory has been made yet.
            pool = CollectorPool(
                self._collector,
                schema=self._setup.schema,
                weights=self._setup.weights,
                options=self._setup.options,
                placement=self._setup.placement,
                topology=self._setup.topology,
                on_message=self._say,
                on_restart=self._restarted,
            )
            stack.callback(pool.close)
            self._pool = pool
            files = RunFiles(self._setup.config, self._setup.ranks)
            stack.callback(files.close)
            self._observer = Observer(self._setup, files, self._sinks)
            stack.callback(self._observer.close)
            pool.add(self._make_learner(pool, files))
            return self._supervised(pool, files)

    def _make_learner(self, pool: CollectorPool, files: RunFiles) -> LearnerWorker:
        setup = self._setup
        place = setup.placement.learner
        plan = LearnerPlan(
            factory=self._learner_factory,
            config=setup.config,
            weights=setup.weights,
            device=setup.learner_device,
            run_dir=files.run_dir,
            cpus=place.cpus,
            node=place.node,
            resume_from=setup.resume_from,
            start=setup.start,
            generation=setup.generation,
            fingerprints=setup.fingerprints,
            ranks=setup.ranks,
        )
        bind = bind_request(place, setup.config.binding, setup.config.memory_policy)
        return LearnerWorker(plan, pool.rings, pool.snapshots, bind=bind)

    def _supervised(self, pool: CollectorPool, files: RunFiles) -> RunResult:
        """Start, watch and end the workers; the outcome is written down in every case."""
        status: RunStatus = "failed"
        try:
            self._start(pool, files)
            status = self._watch(pool)
            self._end(pool)
        except NumaCollectorsError as error:
            self._end(pool)
            result = self._result("failed", pool, files, error=str(error))
            files.write_result(result)
            if isinstance(error, WorkerFailedError):
                raise RunFailedError(str(error), error.failure, result) from None
            raise
        except BaseException as error:
            pool.kill()
            # A second signal raises: the run was interrupted, and its last checkpoint is not of its end.
            status = "failed" if self._signals.requested is None else "interrupted"
            files.write_result(self._result(status, pool, files, error=f"{type(error).__name__}: {error}"))
            raise
        result = self._result(status, pool, files)
        files.write_result(result)
        return result

    def _start(self, pool: CollectorPool, files: RunFiles) -> None:
        assert self._observer is not None
        for message in self._messages:
            self._observer.console.message(message)
        names = [worker.name for worker in pool.workers]
        reports = pool.start(cancelled=lambda: self._signals.requested is not None)
        self._reports = dict(zip(names, reports, strict=False))
        files.write_placement({name: report.to_dict() for name, report in self._reports.items()})
        self._observer.begin(self._reports)

    def _watch(self, pool: CollectorPool) -> RunStatus:
        """Supervise until the learner has reached the target or somebody asked to stop."""
        assert self._observer is not None
        while self._signals.requested is None:
            pool.wait_for_news(_POLL_S)
            pool.poll()
            self._observer.take(pool.workers)
            self._observer.tick(pool.workers)
            learner = pool.workers[-1]  # a restart puts the next generation in its place
            if learner.exitcode is not None and learner.finished:
                return self._verdict(learner)
        self._say(f"{self._signals.requested}: ending in an orderly way; once more kills")
        return "interrupted"

    def _verdict(self, learner: PinnedWorker) -> RunStatus:
        report: LearnerReport | None = learner.result
        if report is None or not report.complete:
            raise WorkerFailedError(
                f"the learner ended before the target of {self._setup.config.planned_env_steps} env steps: every ring had ended"
            )
        return "finished"

    def _restarted(self, worker: PinnedWorker) -> None:
        """Have the collectors make again what a dead learner had taken in since the checkpoint it goes on from."""
        if isinstance(worker, LearnerWorker) and self._pool is not None:
            rings, options = self._pool.rings, self._setup.options
            taken = sum(ring.released * options.envs_of(rank) for rank, ring in enumerate(rings))
            kept = worker.start_env_steps - self._setup.start.env_steps
            self._pool.add_to_quotas(taken - kept)

    def _end(self, pool: CollectorPool) -> None:
        """Collectors first, so that the learner takes in what they committed; half of the one deadline is the learner's."""
        assert self._observer is not None
        timeout_s = self._setup.config.shutdown_timeout_s
        begun_s = time.monotonic()
        for worker in pool.collectors:
            worker.request_stop()
        for worker in pool.collectors:
            worker.join(max(0.0, begun_s + timeout_s / 2 - time.monotonic()))
        self._late = pool.stop(max(timeout_s / 2, begun_s + timeout_s - time.monotonic()))
        self._observer.take(pool.workers)
        for failure in self._late:
            self._say(str(failure))

    def _result(self, status: RunStatus, pool: CollectorPool, files: RunFiles, error: str | None = None) -> RunResult:
        learner = pool.workers[-1]
        report: LearnerReport | None = learner.result
        late = [failure.summary for failure in self._late if failure.role == "learner"]
        error = error or (late[0] if late else None) or (report.error if report else None)
        stats = learner.stats or {}
        start = self._setup.start
        return RunResult(
            status=status,
            env_steps=report.progress.env_steps if report else stats.get("env_steps", start.env_steps),
            updates=report.progress.updates if report else stats.get("updates", start.updates),
            weight_version=report.progress.weight_version if report else stats.get("weight_version", 0),
            wall_s=time.monotonic() - self._begun_s,
            run_dir=files.run_dir,
            checkpoint=report.checkpoint if report else checkpoint.latest(files.run_dir),
            signal=self._signals.requested,
            discarded_slots=report.discarded_slots if report else sum(ring.fill for ring in pool.rings),
            num_restarts=pool.num_restarts,
            placement={name: placement_text(found) for name, found in self._reports.items()},
            error=error,
        )

    def _say(self, text: str) -> None:
        if self._observer is None:
            self._messages.append(text)
        else:
            self._observer.console.message(text)
