"""One collector against two, and against motrix's own trainer: the figures that the users' criteria name.

    python -m benchmarks.acceptance                     about five minutes on two quiet cores; writes docs/acceptance.json
    python -m benchmarks.acceptance --step-ms 20       a cheaper environment: updates weigh more

Each run is ``mxlab train`` (motrix tasks) or our FastSAC (MuJoCo) in a process of its own; the figures are means of the
TensorBoard tags, which are the same for all of them, without the first fifth of the run.  Needs ``make convergence``'s
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAGS = ("perf/env_steps_per_s", "perf/updates_per_s", "perf/learn_pct")
# Light updates and an environment that costs processor time: what is measured is collecting.
SETTINGS = ("algo.agent.num_updates=1", "algo.agent.batch_size=64", "num_envs=64", "logging.interval=20")
MUJOCO = "HalfCheetah-v5"


def run_motrix(task: str, rllib: str, num_collectors: int, iterations: int, step_ms: float) -> dict[str, float]:
    """Run ``mxlab train`` and return the figures of its event file."""
    options = [f"task={task}/{rllib}.fastsac", *SETTINGS, f"algo.trainer.num_learning_iterations={iterations}"]
    options += [f"algo.trainer.async_options.num_collectors={num_collectors}"]
    options += ["algo.trainer.async_options.cpus_per_collector=1"] if num_collectors > 1 else []
    with tempfile.TemporaryDirectory(prefix="acceptance-") as name:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PENDULUM_STEP_CPU_MS": str(step_ms)}
        environment |= {"NUMA_COLLECTORS_LOG_INTERVAL_S": "0.5", "NUMA_COLLECTORS_CONSOLE": "quiet"}
        environment |= {"NUMA_COLLECTORS_OVERSUBSCRIBE": "true"}
        configs = ROOT / "examples" / "motrix_fastsac" / "configs"
        command = [str(Path(sys.executable).with_name("mxlab")), "train", f"--config-dir={configs}", *options]
        started = time.monotonic()
        done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        events = next(Path(name).rglob("events.out.tfevents.*")).parent
        return {**figures(events), "wall_s": time.monotonic() - started}


def run_mujoco(num_collectors: int, env_steps: int) -> dict[str, float]:
    """Run our FastSAC on the MuJoCo task and return the figures of its event file."""
    with tempfile.TemporaryDirectory(prefix="acceptance-") as name:
        command = [sys.executable, "-m", "examples.fastsac.train", "--task", MUJOCO, f"run_dir={name}/run"]
        command += [f"num_collectors={num_collectors}", f"total_env_steps={env_steps}", "num_envs=16", "num_updates=1"]
        command += ["log_interval_s=0.5", "console=quiet", "oversubscribe=true", "learner_device=cpu"]
        command += ["collector_inference_device=cpu", "cpus_per_collector=1"]
        started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return {**figures(Path(name) / "run"), "wall_s": time.monotonic() - started}


def figures(directory: Path) -> dict[str, float]:
    """Return the mean of each tag over the last four fifths of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    found: dict[str, float] = {}
    for tag in TAGS:
        points = accumulator.Scalars(tag) if tag in accumulator.Tags()["scalars"] else []
        values = [point.value for point in points[len(points) // 5 :]]
        found[tag] = statistics.fmean(values) if values else float("nan")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=150.0, help="processor time of a step of all 64 environments")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "acceptance.json")
    arguments = parser.parse_args(argv)
    results: dict[str, dict[str, float]] = {}
    for rllib in ("numa", "motrix"):
        for count in (1, 2):
            name = f"pendulum-np {rllib} {count}"
            # One process steps its shard only: half the environments cost half the time.
            results[name] = run_motrix("pendulum-np", rllib, count, arguments.iterations, arguments.step_ms / 64)
            print(name, results[name], flush=True)
    for count in (1, 2):
        results[f"{MUJOCO} ours {count}"] = run_mujoco(count, max(16_000, arguments.iterations * 16))
        print(MUJOCO, count, results[f"{MUJOCO} ours {count}"], flush=True)
    verdicts = judge(results)
    machine = {"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()}
    arguments.out.write_text(json.dumps({"machine": machine, "runs": results, "verdicts": verdicts}, indent=1) + "\n")
    print(report(results, verdicts))
    return 0 if all(verdict["met"] for verdict in verdicts) else 1


def judge(results: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """Compare 1 with 2 collectors, and ours with motrix's."""
    verdicts: list[dict[str, Any]] = []

    def say(met: bool, text: str) -> None:
        verdicts.append({"met": bool(met), "text": text})

    for task in ("pendulum-np numa", f"{MUJOCO} ours"):
        one, two = results[f"{task} 1"], results[f"{task} 2"]
        ratio = two["perf/env_steps_per_s"] / one["perf/env_steps_per_s"]
        say(ratio >= 1.8, f"{task}: 2 collectors collect {ratio:.2f} times as much as 1 (asked: 1.8)")
        before, after = one["perf/learn_pct"], two["perf/learn_pct"]
        say(after > before, f"{task}: perf/learn_pct from {before:.1f} to {after:.1f}")
    for count in (1, 2):
        ours, theirs = results[f"pendulum-np numa {count}"], results[f"pendulum-np motrix {count}"]
        rates = (ours["perf/env_steps_per_s"], theirs["perf/env_steps_per_s"])
        say(
            rates[0] >= 0.97 * rates[1],
            f"{count} collectors: {rates[0]:.0f} env steps/s against motrix's {rates[1]:.0f}",
        )
    return verdicts


def report(results: Mapping[str, Mapping[str, float]], verdicts: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| run | env steps/s | updates/s | learn % | wall s |", "|---|---|---|---|---|"]
    for name, found in results.items():
        values = [f"{found[tag]:.1f}" for tag in TAGS]
        rows.append(f"| {name} | {' | '.join(values)} | {found['wall_s']:.0f} |")
    rows.append("")
    rows += [f"- {'met' if verdict['met'] else 'not met'}: {verdict['text']}" for verdict in verdicts]
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
