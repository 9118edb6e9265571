"""Does the asynchronous run learn as the synchronous one does?  Same seeds, same settings, figures side by side.

    python -m benchmarks.convergence                    every run that is missing in docs/convergence.json, then the report
    python -m benchmarks.convergence --case pendulum-ms --mode strict-2 --seed 3
    python -m benchmarks.convergence --report

Each run is a process of its own.  ``pendulum-ms`` is motrix's agent on a motrixsim task and needs its environment
(``make convergence``); the others are our FastSAC on MuJoCo tasks.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.recording import PATH_VARIABLE, curve, recording_fastsac, recording_motrix

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "convergence.json"
MOTRIX = "pendulum-ms"
SLOW_VARIABLE = "PENDULUM_STEP_MS"
EVAL_SEED = 10_000


@dataclass(frozen=True)
class Mode:
    """What differs from the defaults; ``motrix`` names options of theirs, the rest is ours."""

    words: str
    num_collectors: int = 2
    inline: bool = False
    learner_bound: bool = False
    bounded: bool = False
    step_ms: float = 0.0
    iterations: int | None = None
    lead_slots: int | None = None


MODES = {
    "sync": Mode("synchronous (inline)", num_collectors=1, inline=True),
    "strict-2": Mode("strict, 2 collectors"),
    "strict-2-lead-4": Mode("strict, 2 collectors, max_lead_slots=4", lead_slots=4),
    "bound-2": Mode("learner_bound with strict's ratio as utd_min, 2 collectors", learner_bound=True, bounded=True),
    "slow-2": Mode(
        "learner_bound, 2 collectors, 300 iterations of environments slowed to 200 ms a step",
        learner_bound=True,
        step_ms=200.0,
        iterations=300,
    ),
}

PLAN: Mapping[str, Mapping[str, Sequence[int]]] = {
    MOTRIX: {
        "sync": range(1, 8),
        "strict-2": range(1, 8),
        "strict-2-lead-4": range(1, 8),
        "bound-2": (1, 2),
        "slow-2": (1,),
    },
    "InvertedDoublePendulum-v5": {
        "sync": range(1, 6),
        "strict-2": range(1, 6),
        "strict-2-lead-4": range(1, 6),
        "bound-2": (1,),
    },
    "InvertedPendulum-v5": {"strict-2": (1, 2)},
}
"""The seeds of every mode of every task."""


def run_motrix(mode: Mode, seed: int, directory: Path) -> dict[str, Any]:
    """Run the recipe of motrix's pendulum through their command's own composition, and evaluate its model file."""
    from hydra import compose, initialize_config_module
    from motrix_fastsac import plugin
    from motrix_rl import runner
    from motrix_rl.cli import to_typed_config
    from motrix_rl.config import TrainConfig
    from motrix_rl.plugins import load_plugins

    load_plugins()
    options = "algo.trainer.async_options."
    overrides = [f"task={MOTRIX}/numa.fastsac", f"seed={seed}", f"algo.asynchronous={str(not mode.inline).lower()}"]
    overrides += [f"{options}num_collectors={mode.num_collectors}"]
    overrides += [f"{options}utd_mode=learner_bound"] if mode.learner_bound else []
    overrides += [f"hydra.searchpath=[file://{ROOT / 'examples' / 'motrix_fastsac' / 'configs'}]"]
    overrides += [f"algo.trainer.num_learning_iterations={mode.iterations}"] if mode.iterations else []
    with initialize_config_module("motrix_rl.configs", version_base=None):
        composed = compose("train", overrides=overrides)
    config = to_typed_config(composed, TrainConfig)
    if mode.bounded:
        os.environ["NUMA_COLLECTORS_UTD_MIN"] = str(config.algo.agent.num_updates / config.num_envs)
    if mode.lead_slots is not None:
        os.environ["NUMA_COLLECTORS_MAX_LEAD_SLOTS"] = str(mode.lead_slots)
    plugin.MotrixLearner = recording_motrix
    result = runner.train(runner.TrainRequest(config=config, runs_root=directory))
    run_dir = Path(result.run.run_dir)
    agent, iterations = config.algo.agent, config.algo.trainer.num_learning_iterations
    return {
        "run_dir": str(run_dir / "numa"),
        "num_envs": config.num_envs,
        "expected": [iterations * config.num_envs, (iterations - agent.learning_starts) * agent.num_updates],
        "eval": evaluate_motrix(config, run_dir / "checkpoints" / "latest.pt"),
    }


def evaluate_motrix(config: Any, model: Path, num_episodes: int = 64) -> float:
    """Return the mean return of the deterministic policy over episodes with fixed seeds."""
    import torch
    from motrix_env_core import registry
    from motrix_fastsac.collector import Task
    from motrix_rl_builtin.fastsac.async_impl.worker import build_env, set_seed

    spec = registry.resolve(config.task.env)
    state = torch.load(model, map_location="cpu", weights_only=False)
    policy = Task.read(spec, config.algo).policy()
    policy["actor"].load_state_dict(state["actor"])
    policy["normalizer"].load_state_dict(state["obs_normalizer"])
    set_seed(EVAL_SEED)
    env = build_env(spec, num_episodes, torch.device("cpu"), seed=EVAL_SEED)
    obs, _ = env.reset()
    returns, running = torch.zeros(num_episodes), torch.ones(num_episodes, dtype=torch.bool)
    while bool(running.any()):
        step = env.step(policy["actor"].explore(policy["normalizer"](obs), deterministic=True))
        returns += step.reward * running
        running &= ~(step.terminated | step.truncated)
        obs = step.obs
    return float(returns.mean())


def run_mujoco(case: str, mode: Mode, seed: int, directory: Path) -> dict[str, Any]:
    """Run our FastSAC on a MuJoCo task with the settings of ``examples.fastsac.train``."""
    from examples.fastsac.train import TASKS, evaluate
    from examples.fastsac.wiring import policy_from_checkpoint, wire
    from numa_collectors.checkpoint import load
    from numa_collectors.config import load_config
    from numa_collectors.trainer import FanOutTrainer

    task = TASKS[case]
    wiring = wire(case, task.algorithm)
    changes: dict[str, Any] = {"seed": seed, "num_collectors": mode.num_collectors, "inline": mode.inline}
    changes |= {"run_dir": directory / "run", "console": "quiet", "learner_device": "cpu"}
    changes |= {"collector_inference_device": "cpu", "tensorboard": False}
    if mode.lead_slots is not None:
        changes["max_lead_slots"] = mode.lead_slots
    config = load_config({**task.run, **changes}, env={})
    if mode.learner_bound:
        ratio = config.num_updates / config.num_envs if mode.bounded else None
        config = config.replace(utd_mode="learner_bound", utd_min=ratio)
    trainer = FanOutTrainer(
        config,
        collector=wiring.collector,
        learner=partial(recording_fastsac, **wiring.learner.keywords),
        schema=wiring.schema,
        weights=wiring.weights,
    )
    result = trainer.run()
    assert result.checkpoint is not None
    policy = policy_from_checkpoint(load(result.checkpoint).state["learner"], wiring.env_spec, task.algorithm)
    returns = evaluate(case, policy, 20)
    per_env_step = config.num_updates / config.num_envs
    return {
        "run_dir": str(result.run_dir),
        "num_envs": config.num_envs,
        "expected": [
            config.planned_env_steps,
            int((config.planned_env_steps - config.learning_starts) * per_env_step),
        ],
        "eval": sum(returns) / len(returns),
    }


def run_one(case: str, mode_name: str, seed: int) -> dict[str, Any]:
    """Make one run in this process and return its figures."""
    mode = MODES[mode_name]
    started = time.monotonic()
    if mode.step_ms:
        os.environ[SLOW_VARIABLE] = str(mode.step_ms)
    with tempfile.TemporaryDirectory(prefix="convergence-") as name:
        directory = Path(name)
        os.environ[PATH_VARIABLE] = str(directory / "episodes.json")
        found = (run_motrix if case == MOTRIX else partial(run_mujoco, case))(mode, seed, directory)
        run_dir = Path(found.pop("run_dir"))
        outcome = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
        if outcome["status"] != "finished":
            raise RuntimeError(f"{case} {mode_name} seed {seed} ended early: {outcome}")
        episodes = json.loads((directory / "episodes.json").read_text(encoding="utf-8"))
        points = curve(episodes, found["num_envs"])
        log = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    waits = [point["wait/data_pct"] for point in log if point.get("perf/updates_per_s")]
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    step = max(1, len(points) // 200)
    return {
        "case": case,
        "mode": mode_name,
        "seed": seed,
        **found,
        "got": [outcome["env_steps"], outcome["updates"]],
        "auc": statistics.fmean(value for _, value in points),
        "last": points[-1][1],
        "wait_data_pct": statistics.fmean(waits) if waits else None,
        "wall_s": round(time.monotonic() - started, 1),
        "cpu_s": round(sum(each.ru_utime + each.ru_stime for each in usage), 1),
        "curve": [(iteration, round(value, 3)) for iteration, value in points[::step]],
    }


def read_results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def run_missing(cases: Sequence[str], modes: Sequence[str]) -> int:
    """Run what is missing, one process at a time; returns the number of failures."""
    failures = 0
    for case in cases:
        for name in modes:
            for seed in PLAN[case].get(name, ()):
                if f"{case}/{name}/{seed}" in read_results():
                    continue
                command = [sys.executable, "-m", "benchmarks.convergence", "--case", case, "--mode", name]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run([*command, "--seed", str(seed)], cwd=ROOT, env=environment, check=False)
                failures += done.returncode != 0
    return failures


def keep(result: dict[str, Any]) -> None:
    """Add a result to the file; runs that end at the same time take turns."""
    RESULTS.parent.mkdir(exist_ok=True)
    with (Path(tempfile.gettempdir()) / "convergence.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read_results()
        results[f"{result['case']}/{result['mode']}/{result['seed']}"] = result
        _write(results)


def _write(results: dict[str, dict[str, Any]]) -> None:
    RESULTS.write_text("{\n" + ",\n".join(f'"{k}": {json.dumps(v)}' for k, v in sorted(results.items())) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence")
    parser.add_argument("--case", choices=list(PLAN))
    parser.add_argument("--mode", choices=sorted(MODES))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--report", action="store_true", help="only write the report")
    arguments = parser.parse_args(argv)
    cases = [arguments.case] if arguments.case else list(PLAN)
    modes = [arguments.mode] if arguments.mode else list(MODES)
    if arguments.seed is not None:
        if len(cases) + len(modes) > 2:
            parser.error("--seed needs --case and --mode")
        result = run_one(cases[0], modes[0], arguments.seed)
        keep(result)
        print({name: value for name, value in result.items() if name != "curve"})
        return 0
    failures = 0 if arguments.report else run_missing(cases, modes)
    from benchmarks.convergence_report import write_report

    met = write_report(read_results(), {name: mode.words for name, mode in MODES.items()})
    return 1 if failures or not met else 0


if __name__ == "__main__":
    sys.exit(main())
