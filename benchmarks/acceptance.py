"""One collector against two, and against motrix's own trainer: the figures that the users' criteria name.

    python -m benchmarks.acceptance                     all cases, three rounds; writes docs/acceptance.json
    python -m benchmarks.acceptance --case motrix       about ten minutes on two quiet cores; mujoco: four, device: nine

Cases: motrix's FastSAC on a pendulum whose every step costs processor time, by ``mxlab train`` with this library's trainer
and with motrix's own; this library's FastSAC on a MuJoCo task; the same with a learner whose updates wait as for a device
of its own (:mod:`benchmarks.waiting_learner`), at a fixed ratio of updates to data and without bounds.  The duty of the
learner is light, so that what is measured is collecting: where there are no more cores than collectors, the learner has
none of its own and takes its time from them.
Every run is a process of its own; the arms take turns, round after round. The figures are the TensorBoard tags of the
criteria, which are the same for all, as means over time without the first fifth of a run; beside them stands the rate by the
events' own clock, and what a second process adds here where nothing is shared (:mod:`benchmarks.ceiling`). Which process may
run where, and how much it ran, is observed from outside. Needs ``make convergence``'s environment.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from benchmarks.ceiling import Ceiling
from benchmarks.comparing import Comparison, CpuMeter, node_remark
from benchmarks.transport import facts
from numa_collectors.topo import Topology

ROOT = Path(__file__).resolve().parents[1]
TAGS = ("perf/env_steps_per_s", "perf/updates_per_s", "perf/learn_pct")
CLOCK = "env steps/s by the clock"
GOAL = 1.8
MOTRIX, MUJOCO = "pendulum-np", "HalfCheetah-v5"
DEVICE, FREE = f"{MUJOCO}, waiting learner", f"{MUJOCO}, waiting learner without bounds"
CASES = {"motrix": (MOTRIX,), "mujoco": (MUJOCO,), "device": (DEVICE, FREE)}
MOTRIX_ENVS, MUJOCO_ENVS = 256, 512
# With so few updates an environment step, and so many environments a slot, the learner takes a twentieth of a CPU; both bounds
# alike keep the ratio exact.
MUJOCO_UTD = 1 / 2048
# At this ratio one collector keeps a device that takes 20 ms for an update busy for a third to a half of the time.
DEVICE_UTD, DEVICE_UPDATE_MS = 1 / 512, 20
# One small update for a step of all environments: less than a twentieth of a CPU.
SETTINGS = ("algo.agent.num_updates=1", "algo.agent.batch_size=64", f"num_envs={MOTRIX_ENVS}", "logging.interval=5")
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# A look costs some 10 ms of CPU time, which the run would miss.
_LOOK_S = 2.0


@dataclass(frozen=True)
class Arm:
    """One way to run a case; ``who`` is "ours" or "motrix"."""

    task: str
    who: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.task}, {self.who}, {self.count} collector{'s' * (self.count > 1)}"


def watched(command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> dict[str, float]:
    """Run ``command`` to its end; return the CPUs that each role used, by role and by where it was allowed to run."""
    begin_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT)
        meter = CpuMeter(process.pid, "main process")
        wall_s = 0.0
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
                    break
                meter.look()
                wall_s = time.monotonic() - begin_s
        finally:
            process.terminate()  # an interrupted benchmark leaves no run behind; has no effect on one that has ended
            process.wait()
        if process.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output.read()[-3000:]}")
    return {role: cpu_s / wall_s for role, cpu_s in meter.last().items() if cpu_s > 0.05 * wall_s}


def run_motrix(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """Run ``mxlab train`` and return the figures of its event file."""
    rllib = "numa" if arm.who == "ours" else "motrix"
    settings = [f"task={arm.task}/{rllib}.fastsac", *SETTINGS]
    settings += [f"algo.trainer.num_learning_iterations={options.iterations}"]
    settings += [f"algo.trainer.async_options.num_collectors={arm.count}"]
    settings += ["algo.trainer.async_options.cpus_per_collector=1"] if arm.count > 1 else []
    with tempfile.TemporaryDirectory(prefix="acceptance-") as name:
        # A process steps its shard only: half of the environments cost half of the time.
        environment = {**os.environ, **THREADS, "PENDULUM_STEP_CPU_MS": str(options.step_ms / MOTRIX_ENVS)}
        # Several slots in each of our intervals, as in each of theirs: of one or none a rate says little.
        environment |= {"NUMA_COLLECTORS_LOG_INTERVAL_S": "2.5", "NUMA_COLLECTORS_CONSOLE": "quiet"}
        environment |= {"NUMA_COLLECTORS_OVERSUBSCRIBE": "true"}
        configs = ROOT / "examples" / "motrix_fastsac" / "configs"
        command = [str(Path(sys.executable).with_name("mxlab")), "train", f"--config-dir={configs}", *settings]
        cores = watched(command, Path(name), environment)
        events = next(Path(name).rglob("events.out.tfevents.*")).parent
        return figures(events, MOTRIX_ENVS) | {"cores": cores}


def run_mujoco(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """Run our FastSAC on the MuJoCo task and return the figures of its event file."""
    bounds = {MUJOCO: MUJOCO_UTD, DEVICE: DEVICE_UTD, FREE: None}[arm.task]
    with tempfile.TemporaryDirectory(prefix="acceptance-") as name:
        if arm.task == MUJOCO:
            command = [sys.executable, "-m", "examples.fastsac.train", "--task", MUJOCO]
        else:
            command = [sys.executable, "-m", "benchmarks.waiting_learner", f"--update-ms={DEVICE_UPDATE_MS}"]
        command += [f"run_dir={name}/run", f"num_collectors={arm.count}", f"total_env_steps={options.env_steps}"]
        command += ["num_updates=1", "utd_mode=learner_bound"]
        command += [f"utd_min={bounds}", f"utd_max={bounds}"] if bounds is not None else []
        command += [f"num_envs={MUJOCO_ENVS}", "log_interval_s=0.5", "console=quiet", "oversubscribe=true"]
        command += ["learner_device=cpu", "collector_inference_device=cpu", "cpus_per_collector=1"]
        cores = watched(command, ROOT, {**os.environ, **THREADS})
        return figures(Path(name) / "run", 1) | {"cores": cores}


def figures(directory: Path, steps_per_unit: int) -> dict[str, float]:
    """Return each tag's mean over time, and the rate by the events' own clock, over the last four fifths of the run.

    Each point stands for the time since the one before: the last one of a run is of a shorter interval.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    found: dict[str, float] = {}
    for tag in TAGS:
        points = accumulator.Scalars(tag)
        points = points[len(points) // 5 :]
        if len(points) < 4:
            raise RuntimeError(
                f"{tag}: expected at least 4 points after the warm-up, got {len(points)}: run for longer"
            )
        seconds = [point.wall_time - before.wall_time for before, point in itertools.pairwise(points)]
        found[tag] = sum(map(mul, (point.value for point in points[1:]), seconds)) / sum(seconds)
        if tag == TAGS[0]:
            span_s = points[-1].wall_time - points[0].wall_time
            found[CLOCK] = (points[-1].step - points[0].step) * steps_per_unit / span_s
    return found


Samples = Mapping[str, Sequence[Mapping[str, Any]]]


def ratios(samples: Samples, one: Arm, other: Arm, tag: str) -> list[float]:
    """Return ``one`` over ``other``, by round."""
    pairs = zip(samples[one.name], samples[other.name], strict=True)
    return [float(a[tag]) / float(b[tag]) for a, b in pairs if b[tag]]


def comparisons(samples: Samples, ceilings: Sequence[float]) -> Iterator[Comparison]:
    """Compare 2 collectors with 1, and ours with motrix's, in each figure."""
    if ceilings:
        yield Comparison(f"{MUJOCO}: steps/s, 2 processes that share nothing over 1", ceilings)
    for task in (MOTRIX, MUJOCO, DEVICE, FREE):
        one, two = Arm(task, "ours", 1), Arm(task, "ours", 2)
        if two.name not in samples:
            continue
        for tag in (TAGS[0], CLOCK):
            yield Comparison(f"{task}: {tag}, 2 collectors over 1", ratios(samples, two, one, tag), GOAL)
        for tag in TAGS[1:]:
            yield Comparison(f"{task}: {tag}, 2 collectors over 1", ratios(samples, two, one, tag))
    for count in (1, 2):
        ours, theirs = Arm(MOTRIX, "ours", count), Arm(MOTRIX, "motrix", count)
        for tag in (*TAGS, CLOCK):
            if ours.name in samples and theirs.name in samples:
                text = f"{MOTRIX}: {tag}, ours over motrix's, {count} collector{'s' * (count > 1)}"
                yield Comparison(text, ratios(samples, ours, theirs, tag))


def remarks(num_cpus: int) -> Iterator[str]:
    """What must be known to read the figures."""
    yield from node_remark(Topology.discover())
    if num_cpus <= 2:
        yield (
            f"{num_cpus} CPUs for 2 collectors and a learner: with one collector the learner runs on the CPU that it "
            "leaves, with two it has none of its own and takes its time from theirs"
        )
    yield (
        "no learner had a device of its own: the one that waits stands in for it, and learns nothing; at a fixed ratio of "
        "updates to data updates/s follow the environments, without bounds they are the learner's own"
    )


def report(samples: Samples) -> Iterator[str]:
    yield "| run | env steps/s | by the clock | updates/s | learn % |\n|---|---|---|---|---|"
    for name, found in samples.items():
        cells = []
        for tag in (TAGS[0], CLOCK, *TAGS[1:]):
            values = [float(sample[tag]) for sample in found]
            cells.append(f"{statistics.median(values):,.1f} ({min(values):,.1f} to {max(values):,.1f})")
        yield f"| {name} | {' | '.join(cells)} |"
    yield "\nCPUs in use over a whole run, its start included, and where each process was allowed to run (last round):"
    for name, found in samples.items():
        used = "; ".join(f"{role} {value:.2f}" for role, value in found[-1]["cores"].items())
        yield f"- {name}: {used}"


def measure(arms: Sequence[Arm], options: argparse.Namespace) -> tuple[dict[str, list[dict[str, Any]]], list[float]]:
    """Return the samples of every arm, and the ratios of processes that share nothing, taken before each MuJoCo arm."""
    samples: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    ceilings = []
    with contextlib.ExitStack() as stack:
        # Its two processes sleep while an arm runs.
        ceiling = stack.enter_context(Ceiling(MUJOCO)) if any(arm.task != MOTRIX for arm in arms) else None
        for number, arm in itertools.product(range(options.rounds), arms):
            run: Callable[[Arm, argparse.Namespace], dict[str, Any]] = run_motrix
            if ceiling is not None and arm.task != MOTRIX:
                ceilings.append(ceiling.ratio())
                run = run_mujoco
            samples[arm.name].append(run(arm, options))
            print(f"round {number + 1}, {arm.name}: {samples[arm.name][-1]}", flush=True)
    return samples, ceilings


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.acceptance")
    parser.add_argument("--case", choices=tuple(CASES), help="left out: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=80, help=f"of motrix's runs, {MOTRIX_ENVS} env steps each")
    parser.add_argument("--step-ms", type=float, default=600.0, help=f"processor time of a step of all {MOTRIX_ENVS}")
    parser.add_argument("--env-steps", type=int, default=200_000, help="of the MuJoCo runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "acceptance.json")
    options = parser.parse_args(argv)
    tasks = CASES[options.case] if options.case else [task for case in CASES.values() for task in case]
    arms = [
        Arm(task, who, count)
        for task in tasks
        for count in (1, 2)
        for who in (("ours", "motrix") if task == MOTRIX else ("ours",))
    ]
    machine = facts()
    samples, ceilings = measure(arms, options)
    notes = [*remarks(len(os.sched_getaffinity(0))), f"load average at the end: {os.getloadavg()[0]:.1f}"]
    compared = list(comparisons(samples, ceilings))
    content = {"machine": machine, "runs": samples, "comparisons": list(map(str, compared)), "remarks": notes}
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(
        "\n".join([json.dumps(machine), *report(samples), "", *(f"- {line}" for line in (*map(str, compared), *notes))])
    )
    return int(any(found.goal is not None and found.verdict.startswith("not met") for found in compared))


if __name__ == "__main__":
    sys.exit(main())
