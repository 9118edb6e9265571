"""On which device should collectors run the policy?  N x CUDA against N x CPU, for N = 1, 2, 4.

    python -m benchmarks.collector_inference [--counts 1,2,4] [--json out.json]       one to two minutes

FastSAC's policy acts without pause on the observations of a shard of ``--num-envs`` environments, in N collector processes
that the library places; each looks for new weights after every slot.  Meanwhile FastSAC's learner updates without pause
and publishes every update.  Measured: what each collector infers, what a load of weights into the inference device costs,
and how many updates the learner makes beside the collectors against alone.  All arms are started first and take turns: a
collector whose ring is full waits.  Where there is no CUDA device the CPU arms run and what was not compared is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.transport import facts
from examples.fastsac.config import EnvSpec, FastSACConfig
from examples.fastsac.learner import FastSACLearner
from examples.fastsac.policy import FastSACPolicy
from examples.fastsac.wiring import weight_spec
from numa_collectors.collector import Collector, CollectorContext
from numa_collectors.placement import PlacementRequest, plan
from numa_collectors.pool import CollectorPool, PoolOptions
from numa_collectors.rings import Field, Schema
from numa_collectors.topo import Topology

ENV = EnvSpec(48, (-1.0,) * 12, (1.0,) * 12)  # a quadruped's sizes
CONFIG = FastSACConfig(compile=False, amp=False, replay_capacity=16_384, batch_size=256, save_replay=False)
# Between two slots: so long does a collector act with one version at least.
ACTS_PER_SLOT = 8
# A loss of updates within this many percentage points of another is no reason to choose.
MARGIN_PCT = 5.0


class InferringCollector(Collector):
    """Acts on random observations; its slots say how often."""

    def __init__(self, ctx: CollectorContext) -> None:
        self._ctx = ctx
        self._policy = FastSACPolicy(ENV, CONFIG, device=ctx.device, seed=ctx.seed)
        self._obs = np.random.default_rng(ctx.seed).standard_normal((ctx.num_envs, ENV.obs_dim), np.float32)

    def collect(self, slot: Mapping[str, np.ndarray]) -> None:
        with self._ctx.timer("act"):
            for _ in range(ACTS_PER_SLOT):
                self._policy.act(self._obs)
        slot["acts"][:] = ACTS_PER_SLOT

    def load_weights(self, weights: Mapping[str, np.ndarray], version: int) -> None:
        self._policy.load_weights(weights, version)
        if self._ctx.device != "cpu":
            # The copy is asynchronous: only now it has cost what it costs.
            torch.cuda.synchronize(self._ctx.device)


@dataclass
class Arm:
    """``count`` collectors that infer on ``device``; None: the learner alone.  One entry a round in each list."""

    device: str
    count: int
    pool: CollectorPool | None = None
    learner_cpus: tuple[int, ...] = ()
    infers_per_s: list[list[float]] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    updates_per_s: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.count} x {self.device}" if self.count else "learner alone"

    def start(self, num_envs: int) -> None:
        self.learner_cpus = tuple(sorted(os.sched_getaffinity(0)))
        if not self.count:
            return
        request = PlacementRequest(num_collectors=self.count, numa_nodes="auto", oversubscribe=True)
        placement = plan(Topology.discover(), request)
        self.pool = CollectorPool(
            InferringCollector,
            schema=Schema([Field("acts", "int64")]),
            weights=weight_spec(ENV, CONFIG),
            options=PoolOptions(num_envs, self.count, ring_capacity=64, device=self.device),
            placement=placement,
        )
        self.pool.start()
        self.learner_cpus = placement.learner.cpus or self.learner_cpus

    def run(self, learner: FastSACLearner, seconds: float) -> tuple[int, float]:
        """Update and publish without pause; return the number of updates and the time they took."""
        updates, begin_s = 0, time.perf_counter()
        while (wall_s := time.perf_counter() - begin_s) < seconds:
            learner.update(1)  # ends with the transfer of its metrics: nothing is left in the device's queue
            updates += 1
            if self.pool is not None:
                self.pool.publish(learner.weights())
                for _ in self.pool.drain():
                    continue
        return updates, wall_s

    def measure(self, learner: FastSACLearner, settle_s: float, measure_s: float) -> None:
        os.sched_setaffinity(0, self.learner_cpus)
        self.run(learner, settle_s)
        before = {} if self.pool is None else dict(self.pool.stats())
        updates, wall_s = self.run(learner, measure_s)
        self.updates_per_s.append(updates / wall_s)
        if self.pool is None:
            return
        self.pool.poll()
        deltas = [
            {name: now[name] - before[rank][name] for name in ("time_ns", "env_steps", "sync_ns", "weight_loads")}
            for rank, now in sorted(self.pool.stats().items())
        ]
        self.infers_per_s.append([ACTS_PER_SLOT * d["env_steps"] / max(1, d["time_ns"]) * 1e9 for d in deltas])
        loads = sum(d["weight_loads"] for d in deltas)
        self.load_ms.append(sum(d["sync_ns"] for d in deltas) / max(1, loads) / 1e6)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def make_learner(device: str) -> FastSACLearner:
    """Return a learner with a full memory of random transitions."""
    learner = FastSACLearner(ENV, CONFIG, num_envs=(64,), device=device)
    sizes = {"obs": (ENV.obs_dim,), "action": (ENV.action_dim,), "next_obs": (ENV.obs_dim,), "reward": ()}
    batch = {name: torch.rand(32, 64, *size, device=device) for name, size in sizes.items()}
    flags = {name: torch.zeros(32, 64, dtype=torch.bool, device=device) for name in ("terminated", "truncated")}
    learner.ingest(0, batch | flags)
    learner.update(3)
    return learner


def losses_pct(arm: Arm, alone: Arm) -> list[float]:
    """Return, by round, the share of the lone learner's updates that ``arm`` cost."""
    pairs = zip(arm.updates_per_s, alone.updates_per_s, strict=True)
    return [100 * (1 - beside / by_itself) for beside, by_itself in pairs]


def recommend(arms: Mapping[str, Arm], counts: Sequence[int], cuda: str | None) -> Iterator[str]:
    """Say, for each number of collectors, which device to choose, and only what every round shows."""
    if cuda is None:
        yield "no CUDA device here: N x CUDA was not compared with N x CPU, and the default cannot be judged from this"
        yield "collector_inference_device=cuda falls back to the CPU on such a machine; nothing is to be set"
        return
    for count in counts:
        on_cpu, on_cuda = arms[f"{count} x cpu"], arms[f"{count} x {cuda}"]
        pairs = zip(on_cuda.infers_per_s, on_cpu.infers_per_s, strict=True)
        ratios = [sum(one) / sum(other) for one, other in pairs]
        loss_cuda, loss_cpu = (statistics.median(losses_pct(arm, arms["learner alone"])) for arm in (on_cuda, on_cpu))
        seen = (
            f"{count} collectors: CUDA infers {statistics.median(ratios):.2f} times as much as the CPU ({min(ratios):.2f} to "
            f"{max(ratios):.2f}); the learner loses {loss_cuda:.0f} % beside CUDA, {loss_cpu:.0f} % beside CPU inference"
        )
        faster, slower = min(ratios) > 1.0, max(ratios) < 1.0
        dearer, cheaper = loss_cuda > loss_cpu + MARGIN_PCT, loss_cuda < loss_cpu - MARGIN_PCT
        if (faster and not dearer) or (cheaper and not slower):
            yield f"{seen}: choose cuda"
        elif (slower and not cheaper) or (dearer and not faster):
            yield f"{seen}: choose cpu"
        elif faster or slower:
            other = ("cuda", "cpu") if faster else ("cpu", "cuda")
            yield f"{seen}: {other[0]} where the environments hold the run back, {other[1]} where the learner does"
        else:
            yield f"{seen}: no difference beyond the noise, keep the default"


def table(arms: Sequence[Arm], alone: Arm) -> Iterator[str]:
    yield f"{'arm':16s}{'updates/s':>22s}{'learner loses':>20s}{'weight load':>14s}   inferred env steps/s of each collector"
    for arm in arms:
        values, losses = arm.updates_per_s, losses_pct(arm, alone)
        cells = f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})".rjust(22)
        cells += (
            f"{statistics.median(losses):.0f} % ({min(losses):.0f}-{max(losses):.0f})".rjust(20) if arm.count else ""
        )
        if arm.count:
            each = [statistics.median(rank) for rank in zip(*arm.infers_per_s, strict=True)]
            cells += f"{statistics.median(arm.load_ms):.2f} ms".rjust(14) + "   " + ", ".join(f"{n:,.0f}" for n in each)
        yield f"{arm.name:16s}{cells}"


def shared(arms: Sequence[Arm]) -> Iterator[str]:
    """Say where the learner and the collectors were allowed to run."""
    for arm in arms:
        if arm.pool is not None:
            cpus = [list(worker.cpus or ()) for worker in arm.pool.placement.collectors]
            common = set(arm.learner_cpus) & {cpu for found in cpus for cpu in found}
            note = ": the learner's loss is also that of CPUs which it shares with collectors" if common else ""
            yield f"{arm.name}: learner on CPUs {list(arm.learner_cpus)}, collectors on {cpus}{note}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collector_inference", description="CUDA or CPU?")
    parser.add_argument("--counts", default="1,2,4", help="numbers of collectors")
    parser.add_argument("--num-envs", type=int, default=64, help="rows of an inference, over all collectors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure-s", type=float, default=2.0)
    parser.add_argument("--settle-s", type=float, default=0.5, help="run before each sample and not counted")
    parser.add_argument("--json", type=Path, help="write the figures and the recommendation to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)  # as the collectors: a pool of threads would spin for the CPUs that they need
    counts = [int(text) for text in options.counts.split(",")]
    cuda = "cuda:0" if torch.cuda.is_available() else None
    devices = ["cpu", cuda] if cuda else ["cpu"]
    machine = facts() | {"gpu": torch.cuda.get_device_name(0) if cuda else None, "torch": torch.__version__}
    alone = Arm("cpu", 0)
    arms = [alone, *(Arm(device, count) for count in counts for device in devices)]
    learner = make_learner(cuda or "cpu")
    try:
        for arm in arms:
            arm.start(options.num_envs)
        for _ in range(options.rounds):
            for arm in arms:
                arm.measure(learner, options.settle_s, options.measure_s)
    finally:
        for arm in arms:
            arm.close()
    words = list(recommend({arm.name: arm for arm in arms}, counts, cuda))
    print(json.dumps(machine))
    print(f"learner on {cuda or 'cpu'}; {options.num_envs} environments, networks {CONFIG.hidden_sizes}")
    print(
        "\n".join(
            [*table(arms, alone), "", *shared(arms), *words, f"load average at the end: {os.getloadavg()[0]:.1f}"]
        )
    )
    if options.json is not None:
        figures = {
            arm.name: {name: getattr(arm, name) for name in ("infers_per_s", "load_ms", "updates_per_s")}
            for arm in arms
        }
        content = {"machine": machine, "learner_device": cuda or "cpu", "arms": figures, "recommendation": words}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
