"""What metrics cost the learner: the share of its time that reporting takes, and what the parent spends on log points.

    python -m benchmarks.metrics_overhead [--env-steps N] [--collectors 1 3]

The learner's process spends time on metrics in one place, where it builds a report and writes it to its pipe, ten times a
second.  The processor time of that is taken in a real run (wall time would count other processes on a busy machine), and that
of the parent, which reads the pipes and writes the log points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.quickstart import SCHEMA, PointCollector, PointLearner, make_actor
from numa_collectors.config import RunConfig
from numa_collectors.learner import LearnerContext
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer
from numa_collectors.trainer._session import LearnerSession
from numa_collectors.trainer._worker import LearnerWorker


class TimedLearner(PointLearner):
    """Times the reports of the worker that it lives in, and hands the sum over with its scalars."""

    def __init__(self, ctx: LearnerContext, capacity: int) -> None:
        super().__init__(ctx, capacity)
        torch.set_num_threads(1)
        self.reports_ms: list[float] = []
        post = LearnerWorker._post

        def timed(worker: LearnerWorker, session: LearnerSession) -> None:
            began = time.thread_time()
            post(worker, session)
            self.reports_ms.append(1e3 * (time.thread_time() - began))

        LearnerWorker._post = timed  # type: ignore[method-assign, assignment]
        self.began_s = time.perf_counter()

    def update(self, num_updates: int) -> Mapping[str, float]:
        elapsed_ms = 1e3 * (time.perf_counter() - self.began_s)
        return {
            **super().update(num_updates),
            "report_pct": 100 * sum(self.reports_ms) / elapsed_ms,
            "report_ms": statistics.mean(self.reports_ms) if self.reports_ms else 0.0,
        }


def measure(num_collectors: int, env_steps: int) -> dict[str, Any]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        config = RunConfig(
            num_envs=16,
            num_collectors=num_collectors,
            total_env_steps=env_steps,
            learning_starts=640,
            log_interval_s=1.0,
            console="quiet",
            oversubscribe=True,
            learner_device="cpu",
            collector_inference_device="cpu",
            run_dir=run_dir,
            start_timeout_s=600.0,
        )
        trainer = FanOutTrainer(
            config,
            collector=PointCollector,
            learner=partial(TimedLearner, capacity=20_000),
            schema=SCHEMA,
            weights=WeightSpec.like(make_actor().state_dict()),
        )
        began_s, cpu_s = time.monotonic(), time.process_time()
        result = trainer.run()
        cpu_s = time.process_time() - cpu_s
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "wall_s": time.monotonic() - began_s,
        "updates": result.updates,
        "report_pct": lines[-1]["train/report_pct"],
        "report_ms": lines[-1]["train/report_ms"],
        "parent_cpu_s": cpu_s,
        "points": len(lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--env-steps", type=int, default=20_000)
    parser.add_argument("--collectors", type=int, nargs="+", default=[1, 3])
    arguments = parser.parse_args()
    for number in arguments.collectors:
        found = measure(number, arguments.env_steps)
        print(
            f"{number} collector(s), {found['updates']} updates: a report takes {found['report_ms']:.3f} ms of processor time, "
            f"at ten a second {found['report_ms']:.2f} % of the learner's time ({found['report_pct']:.2f} % as they came); "
            f"the parent, its start and {found['points']} log points included, {found['parent_cpu_s']:.2f} s in "
            f"{found['wall_s']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
