"""What the parent sees of a run: counters become log points, events become lines, drift becomes a warning."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from numa_collectors._cpulist import format_cpulist
from numa_collectors.binding import BindReport, Drift
from numa_collectors.metrics import (
    Console,
    ConsolePanel,
    JsonlSink,
    MetricsHub,
    Sink,
    TensorBoardSink,
    Window,
    make_console,
    process_usage,
)
from numa_collectors.trainer._files import RunFiles
from numa_collectors.trainer._setup import RunSetup
from numa_collectors.worker import PinnedWorker

__all__ = ["Observer", "placement_text"]

_CONSOLE_INTERVAL_S = 1.0
_RECHECK_INTERVAL_S = 30.0


def placement_text(report: BindReport) -> str:
    """Return the few words about a worker's binding that the console has room for."""
    if report.applied == "none":
        return "not bound" if report.requested.target == "none" else f"not bound ({report.reason})"
    cpus = "" if report.cpus is None else f"CPUs {format_cpulist(report.cpus)}"
    nodes = "" if not report.policy_nodes else f"node {format_cpulist(report.policy_nodes)}"
    share = report.local_fraction
    pages = "" if share is None else f"{100 * share:.1f} % local"
    return ", ".join(part for part in (cpus, nodes, pages, "verified" if report.verified else "unverified") if part)


class Observer:
    """The hub, its sinks and the console of one run; owned by the thread that supervises it."""

    def __init__(self, setup: RunSetup, files: RunFiles, sinks: Sequence[Sink]) -> None:
        config = setup.config
        self._resume_step = setup.start.env_steps if setup.resume_from is not None else None
        self._run_dir = files.run_dir
        self._begun = False
        # One writer for all ranks: the others have neither metrics nor a console.
        self._main = setup.ranks.is_main
        self._first_collector = setup.options.first_collector
        self.hub = MetricsHub(
            config.num_collectors, sinks if self._main else (), target_env_steps=config.planned_env_steps
        )
        self.console: Console = make_console(config.console if self._main else "quiet")
        self._config = config
        self._num_collectors = config.num_collectors
        self._window: Window = self.hub.window()
        self._seen_drift: dict[str, tuple[Drift, ...]] = {}
        self._digests: dict[int, int] = {}
        self._warned_seeds: set[str] = set()
        now = time.monotonic()
        self._next_console_s = now + _CONSOLE_INTERVAL_S
        self._next_log_s = now + config.log_interval_s
        self._next_recheck_s = now + _RECHECK_INTERVAL_S

    def begin(self, reports: Mapping[str, BindReport]) -> None:
        """Take the bind reports; the run's clock starts now, and so do its files: a run that never began leaves none."""
        if self._main:
            self.hub.add_sink(JsonlSink(self._run_dir, resume_step=self._resume_step))
        if self._main and self._config.tensorboard:
            self.hub.add_sink(TensorBoardSink(self._run_dir, resume_step=self._resume_step))
        self._begun = True
        for name, report in reports.items():
            self.console.message(f"{name}: {report}")
            self._place(name, report, ())
        self.hub.begin()
        self._window = self.hub.window()

    def take(self, workers: Sequence[PinnedWorker]) -> None:
        """Take what the workers have reported since the last call."""
        for worker in workers:
            for event in worker.events():
                self.console.message(f"{worker.name}: {event.get('message', event)}")
            stats = worker.stats
            if stats is not None:
                self.counters(worker.role, worker.rank, stats, worker.generation)
            self._look_at_drift(worker)

    def counters(self, role: str, rank: int, stats: Mapping[str, Any], generation: int) -> None:
        """Take one report of a collector (``rank`` is its run-wide number) or of the learner."""
        if role == "collector":
            self.hub.update_collector(rank - self._first_collector, stats, generation)
            self._look_at_seeds(rank, stats)
        elif role == "learner":
            self.hub.update_learner(stats, generation)

    @property
    def due(self) -> bool:
        """Whether :meth:`tick` has something to do; cheap enough for every round of a loop."""
        return time.monotonic() >= min(self._next_console_s, self._next_log_s)

    def tick(self, workers: Sequence[PinnedWorker] = ()) -> None:
        """Log, show and look again at the bindings where it is time."""
        now = time.monotonic()
        if now >= self._next_recheck_s:
            self._next_recheck_s = now + _RECHECK_INTERVAL_S
            for worker in workers:
                if worker.bind_report is not None and worker.exitcode is None:
                    worker.request_recheck()
        if now >= self._next_log_s:
            self._next_log_s = now + self._config.log_interval_s
            self._usage(workers)
            point = self.hub.log()
            if point is not None:
                self.console.update(point)
                self._window = self.hub.window()
                self._next_console_s = now + _CONSOLE_INTERVAL_S
        elif now >= self._next_console_s:
            self._next_console_s = now + _CONSOLE_INTERVAL_S
            # A panel is redrawn between log points; plain lines are not.
            if isinstance(self.console, ConsolePanel):
                self.console.update(self.hub.point(self._window))

    def _usage(self, workers: Sequence[PinnedWorker]) -> None:
        for worker in workers:
            if worker.pid is None or worker.exitcode is not None or worker.stats is None:
                continue
            stats = {**worker.stats, **process_usage(worker.pid)}
            self.counters(worker.role, worker.rank, stats, worker.generation)

    def _look_at_drift(self, worker: PinnedWorker) -> None:
        drift, report = worker.drift, worker.bind_report
        if report is None or drift == self._seen_drift.get(worker.name, ()):
            return
        self._seen_drift[worker.name] = drift
        for entry in drift:
            self.console.message(f"{worker.name}: its binding has changed: {entry}")
        self._place(worker.name, report, drift)

    def _place(self, name: str, report: BindReport, drift: tuple[Drift, ...]) -> None:
        key = name if not name.startswith("collector") else "collector_" + name[name.index("[") + 1 : -1]
        key = "learner" if key.startswith("learner") else key
        text = placement_text(report)
        self.hub.update_placement(key, report.pages_on_node, report.pages_total, drift=len(drift), text=text)

    def _look_at_seeds(self, rank: int, stats: Mapping[str, Any]) -> None:
        """Warn, once each, of environments that begin alike in two collectors or in one: they ignore their seed."""
        digest = stats.get("first_obs_digest")
        if digest is None or rank in self._digests:
            return
        same = [other for other, known in self._digests.items() if known == digest]
        self._digests[rank] = digest
        if same:
            self._warn_of_seeds("across", f"collector[{same[0]}] and collector[{rank}] began with the same observation")
        distinct, num_envs = stats["first_obs_distinct"], stats["env_steps"] // max(1, stats["slots"])
        if distinct < num_envs:
            self._warn_of_seeds(
                "within",
                f"collector[{rank}]: its {num_envs} environments began with {distinct} different observation(s)",
            )

    def _warn_of_seeds(self, kind: str, what: str) -> None:
        if kind not in self._warned_seeds:
            self._warned_seeds.add(kind)
            self.console.message(f"{what}: does the environment ignore its seed, or does it always start alike?")

    def close(self) -> None:
        """Write the last point and close sinks and console; idempotent."""
        if self._begun:
            self.hub.log()
        self.hub.close()
        self.console.close()
