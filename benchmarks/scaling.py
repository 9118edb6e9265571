"""How collecting scales with collectors, and beside what else there is: 1, 2, 4 and N collectors, bound and unbound.

    python -m benchmarks.scaling [--env HalfCheetah-v5] [--counts 1,2,4,N] [--json out.json]
    python -m benchmarks.scaling --quick            shows that it runs; its figures mean little

All arms do one job (:mod:`benchmarks.scaling_arms`): the same policy, the same total number of environments, every
transition copied into a replay memory in the learner's process, one update for so many transitions.  All are started
first; then they are measured in turn, one at a time, round after round, each sample after a stretch that is not counted.
Ratios are taken within a round.  A gain is claimed only where every round shows it.  Peers that are not installed are
named with the reason.  Measure on a quiet machine: what other processes took is said.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.comparing import Comparison, node_remark
from benchmarks.scaling_arms import KINDS, ArmSpec, Sample, serve
from benchmarks.transport import facts
from numa_collectors.topo import Topology

GOAL = 1.8
FIGURES = {
    "env_steps_per_s": "env steps/s",
    "env_steps_per_cpu_s": "env steps a CPU second",
    "updates_per_s": "updates/s",
    "learn_pct": "learn %",
}
START_TIMEOUT_S = 180.0
# One thread in every process of every arm: a pool sized by the machine would fight the collectors for every core.
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class RunningArm:
    """An arm in a process of its own, which may run on every CPU that this one may."""

    def __init__(self, spec: ArmSpec, cpus: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.spec = spec
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, spec, cpus), name=spec.name)
        self._process.start()
        theirs.close()

    def wait_ready(self) -> tuple[str, str]:
        """Return ``("ready", version)`` or ``("skipped", reason)``."""
        if not self._pipe.poll(START_TIMEOUT_S):
            return "skipped", f"not ready within {START_TIMEOUT_S:g} s"
        try:
            answer: tuple[str, str] = self._pipe.recv()
        except EOFError:
            return "skipped", "its process died at the start; what it said is above"
        return answer

    def sample(self, settle_s: float, measure_s: float) -> Sample:
        self._pipe.send((settle_s, measure_s))
        sample: Sample = self._pipe.recv()
        return sample

    def stop(self) -> None:
        """End the arm; one that does not end is killed."""
        if self._process.is_alive():
            try:
                self._pipe.send(None)
            except BrokenPipeError:
                print(f"{self.spec.name}: was gone before its end", file=sys.stderr)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass
class Report:
    """Samples by arm, in the order of the rounds, and why arms are missing."""

    machine: Mapping[str, Any]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def ratios(self, one: str, other: str, figure: str = "env_steps_per_s") -> list[float]:
        pairs = zip(self.samples[one], self.samples[other], strict=True)
        return [a.figures[figure] / b.figures[figure] for a, b in pairs if b.figures[figure]]

    def compare(
        self, one: str, other: str, goal: float | None = None, figure: str = "env_steps_per_s"
    ) -> Iterator[Comparison]:
        if one in self.samples and other in self.samples and one != other:
            yield Comparison(f"{FIGURES[figure]}, {one} over {other}", self.ratios(one, other, figure), goal)

    def comparisons(self, counts: Sequence[int], num_cpus: int) -> Iterator[Comparison]:
        """What is asked: growth with collectors, what binding brings, and ours against every other."""
        one, two = (ArmSpec("ours", "", 1, 1, count, True).name for count in (1, 2))
        yield from self.compare(two, one, GOAL)
        for count in counts:
            arms = [ArmSpec("ours", "", 1, 1, count, bound).name for bound in (True, False)]
            yield from self.compare(arms[1], ArmSpec("ours", "", 1, 1, 1, False).name)
            yield from self.compare(arms[0], arms[1])
        best = ArmSpec("ours", "", 1, 1, max((count for count in counts if count <= num_cpus), default=1), True).name
        for peer in self.samples:
            if peer in KINDS:
                yield from self.compare(best, peer)
                # What other processes take changes this less.
                yield from self.compare(best, peer, figure="env_steps_per_cpu_s")


def measure(specs: Sequence[ArmSpec], options: argparse.Namespace, report: Report) -> None:
    """Start every arm, one after another, and sample them in turn."""
    cpus = sorted(os.sched_getaffinity(0))
    arms: list[RunningArm] = []
    try:
        for spec in specs:
            arm = RunningArm(spec, cpus)
            arms.append(arm)
            status, text = arm.wait_ready()
            print(f"{spec.name}: {status}, {text}", flush=True)
            if status == "ready":
                report.samples[spec.name] = []
            else:
                report.skipped[spec.name] = text
        for _ in range(options.rounds):
            for arm in arms:
                if arm.spec.name in report.samples:
                    report.samples[arm.spec.name].append(arm.sample(options.settle_s, options.measure_s))
    finally:
        for arm in arms:
            arm.stop()


def table(report: Report) -> Iterator[str]:
    """Median and range of each figure, and how the cores were shared."""
    yield f"{'arm':32s}" + "".join(f"{title:>26s}" for title in FIGURES.values())
    for name, samples in report.samples.items():
        cells = []
        for figure in FIGURES:
            values = [sample.figures[figure] for sample in samples]
            digits = 0 if figure.startswith("env_steps") else 1
            spread = f"({min(values):,.{digits}f}-{max(values):,.{digits}f})"
            cells.append(f"{statistics.median(values):,.{digits}f} {spread}".rjust(26))
        yield f"{name:32s}{''.join(cells)}"
    yield "\nCPUs in use while measured (medians), and where each process was allowed to run:"
    for name, samples in report.samples.items():
        roles = dict.fromkeys(role for sample in samples for role in sample.cores)
        used = {role: statistics.median(sample.cores.get(role, 0.0) for sample in samples) for role in roles}
        yield f"  {name}: " + "; ".join(f"{role} {value:.2f}" for role, value in used.items() if value >= 0.005)


def remarks(report: Report, topology: Topology, num_cpus: int) -> Iterator[str]:
    """What must be known to read the figures."""
    yield from node_remark(topology)
    bound = [name for name in report.samples if name.endswith("collectors, bound")]
    totals = [statistics.median(sum(s.cores.values()) for s in report.samples[name]) for name in bound]
    if totals and max(totals) < 0.9 * min(num_cpus, 2):
        yield (
            f"other processes had the machine too: no arm got more than {max(totals):.2f} of {num_cpus} CPUs; measure again "
            "when it is quiet"
        )
    for name, why in report.skipped.items():
        yield f"not measured: {name}: {why}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description="Collectors, and their peers.")
    parser.add_argument("--env", default="HalfCheetah-v5", help="an id with flat observations and a box of actions")
    parser.add_argument("--num-envs", type=int, default=16, help="environments of each arm, over all its processes")
    parser.add_argument("--counts", default="1,2,4,N", help="numbers of collectors; N is one for each allowed CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure-s", type=float, default=1.5)
    parser.add_argument("--settle-s", type=float, default=0.5, help="run before each sample and not counted")
    parser.add_argument("--steps-per-update", type=int, default=1024, help="a light duty for the learner")
    parser.add_argument("--only", default="", help="arms whose names contain this")
    parser.add_argument("--quick", action="store_true", help="one short round of 1 and 2 collectors and of one process")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.counts, options.rounds, options.measure_s, options.settle_s = "1,2", 1, 0.3, 0.1
    return options


def arm_specs(options: argparse.Namespace, counts: Iterable[int], num_workers: int) -> Iterator[ArmSpec]:
    job = (options.env, options.num_envs, options.steps_per_update)
    for count in counts:
        yield ArmSpec("ours", *job, num_workers=count, bound=True)
        yield ArmSpec("ours", *job, num_workers=count)
    kinds = list(KINDS)[1:2] if options.quick else list(KINDS)[1:]
    for kind in kinds:
        yield ArmSpec(kind, *job, num_workers=num_workers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status is 0 whatever the figures are."""
    options = parse(arguments)
    os.environ |= THREADS
    topology, num_cpus = Topology.discover(), len(os.sched_getaffinity(0))
    counts = sorted({num_cpus if text == "N" else int(text) for text in options.counts.split(",")})
    counts = [count for count in counts if count <= options.num_envs]
    report = Report({**facts(), "numa_nodes": len(topology.numa_nodes), "usable_cpus": num_cpus})
    print(json.dumps(report.machine))
    specs = [s for s in arm_specs(options, counts, min(num_cpus, options.num_envs)) if options.only in s.name]
    measure(specs, options, report)
    comparisons = list(report.comparisons(counts, num_cpus))
    job = (
        f"{options.env}, {options.num_envs} environments in every arm, one update for {options.steps_per_update} steps"
    )
    lines = ["", job, *table(report), "", *map(str, comparisons), *remarks(report, topology, num_cpus)]
    print("\n".join([*lines, f"load average at the end: {os.getloadavg()[0]:.1f}"]))
    if options.json is not None:
        samples = {name: [asdict(s) | s.figures for s in found] for name, found in report.samples.items()}
        content = {"job": job, "machine": report.machine, "samples": samples, "skipped": report.skipped}
        content |= {"comparisons": list(map(str, comparisons)), "remarks": list(remarks(report, topology, num_cpus))}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
