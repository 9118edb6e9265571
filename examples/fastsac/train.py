"""Train FastSAC with pinned collectors on a MuJoCo task.

    python -m examples.fastsac.train                                  two collectors, about a minute on two cores
    python -m examples.fastsac.train --task HalfCheetah-v5
    python -m examples.fastsac.train num_collectors=4 numa_nodes=auto seed=3
    python -m examples.fastsac.train --explain                        what would run where; starts nothing

Every ``key=value`` is a field of ``RunConfig``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from numa_collectors.checkpoint import load
from numa_collectors.config import load_config
from numa_collectors.errors import NumaCollectorsError
from numa_collectors.topo import Topology
from numa_collectors.trainer import FanOutTrainer, RunResult

from .config import FastSACConfig
from .policy import FastSACPolicy
from .wiring import policy_from_checkpoint, wire

DEFAULT_TASK = "InvertedDoublePendulum-v5"
EVAL_EPISODES = 5
EVAL_SEED = 10_000


@dataclass(frozen=True)
class Task:
    """Settings that learn a task within minutes on two cores.

    torch.compile is off: what it takes to compile such small networks, a run this short does not win back.
    """

    algorithm: FastSACConfig
    run: dict[str, Any] = field(default_factory=dict)


RUN = {"num_envs": 8, "num_collectors": 2, "learning_starts": 1_000, "log_interval_s": 2.0}
SMALL = FastSACConfig(
    hidden_sizes=(64, 64),
    num_atoms=51,
    gamma=0.98,
    tau=0.05,
    critic_lr=1e-3,
    actor_lr=1e-3,
    alpha_lr=1e-3,
    alpha_init=0.05,
    compile=False,
    learner_threads=1,
)
TASKS = {
    "InvertedDoublePendulum-v5": Task(
        replace(SMALL, v_min=-500.0, v_max=500.0, clipped_double_q=False), {**RUN, "total_env_steps": 32_000}
    ),
    "InvertedPendulum-v5": Task(replace(SMALL, v_min=-10.0, v_max=60.0), {**RUN, "total_env_steps": 32_000}),
    "HalfCheetah-v5": Task(
        replace(SMALL, v_min=-50.0, v_max=250.0, gamma=0.99),
        {**RUN, "num_envs": 16, "num_updates": 2, "learning_starts": 2_000, "total_env_steps": 64_000},
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.fastsac.train", description="Train FastSAC.")
    parser.add_argument("--task", choices=sorted(TASKS), default=DEFAULT_TASK)
    parser.add_argument("--explain", action="store_true", help="say what would run where, and start nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields of RunConfig")
    arguments = parser.parse_args(argv)
    task = TASKS[arguments.task]
    try:
        config = load_config(task.run, overrides=arguments.overrides)
        wiring = wire(arguments.task, task.algorithm)
        trainer = FanOutTrainer(
            config, collector=wiring.collector, learner=wiring.learner, schema=wiring.schema, weights=wiring.weights
        )
        print(trainer.explain() if arguments.explain else place_in_words(config.num_collectors), flush=True)
        if arguments.explain:
            return 0
        result = trainer.run()
    except NumaCollectorsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    policy = None
    if result.checkpoint is not None:
        policy = policy_from_checkpoint(load(result.checkpoint).state["learner"], wiring.env_spec, task.algorithm)
    report(arguments.task, result, policy)
    return result.exit_code


def place_in_words(num_collectors: int) -> str:
    """Say what the machine offers to ``num_collectors`` collectors."""
    num_nodes = len(Topology.discover().numa_nodes)
    if num_nodes > 1:
        return f"This machine has {num_nodes} NUMA nodes: {num_collectors} collectors are spread over them."
    return f"This machine has one NUMA node: the {num_collectors} collectors are placed on separate cores."


def report(task: str, result: RunResult, policy: FastSACPolicy | None) -> None:
    """Say what was learnt, how fast, where each worker ran, and where the files are."""
    curve = learning_curve(result.run_dir)
    print(f"\n{result.summary()}")
    if result.wall_s > 0:
        rates = (result.env_steps / result.wall_s, result.updates / result.wall_s)
        print(f"  rates, start-up included: {rates[0]:,.0f} env steps/s, {rates[1]:,.1f} updates/s")
    if len(curve) >= 2:
        print(f"  return of an episode while training: {curve[0][1]:,.1f} at first, {curve[-1][1]:,.1f} at last")
        picture = plot(task, curve, result.run_dir / "learning_curve.png")
        print(f"  learning curve: {picture}")
    if policy is not None:
        returns = evaluate(task, policy)
        print(
            f"  final policy without noise: mean return {np.mean(returns):,.1f} over {len(returns)} episodes "
            f"({min(returns):,.1f} to {max(returns):,.1f})"
        )
    print(f"  tensorboard --logdir {result.run_dir}")


def learning_curve(run_dir: Path) -> list[tuple[int, float]]:
    """Return (environment steps, mean return of the episodes that ended since the point before)."""
    points = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        scalars = json.loads(line)
        if scalars.get("rollout/mean_return") is not None:
            points.append((int(scalars["step"]), float(scalars["rollout/mean_return"])))
    return points


def plot(task: str, curve: Sequence[tuple[int, float]], path: Path) -> Path:
    """Draw the curve to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([step for step, _ in curve], [value for _, value in curve], marker="o", markersize=3)
    axes.set(xlabel="environment steps", ylabel="mean return of finished episodes", title=f"FastSAC on {task}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    return path


def evaluate(task: str, policy: FastSACPolicy, num_episodes: int = EVAL_EPISODES) -> list[float]:
    """Return the returns of episodes with fixed seeds."""
    import gymnasium

    env = gymnasium.make(task)
    returns = []
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=EVAL_SEED + episode)
        total, over = 0.0, False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy.act(np.asarray(obs)[None])[0])
            total += float(reward)
            over = terminated or truncated
        returns.append(total)
    env.close()
    return returns


if __name__ == "__main__":
    sys.exit(main())
