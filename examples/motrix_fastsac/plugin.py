"""The framework ``numa`` of mxlab: their configuration in, a run of ours, their files out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from motrix_rl.frameworks import RlFramework, TrainerContext, register_framework
from motrix_rl.training_logger import TrainingLogger
from motrix_rl_builtin.fastsac.framework import FastSacProvider
from motrix_rl_builtin.fastsac.sync.train import Trainer as TheirTrainer

from numa_collectors import checkpoint
from numa_collectors.config import RunConfig, load_config
from numa_collectors.errors import ConfigError
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer

from .collector import MotrixCollector, Task
from .learner import MotrixLearner, save_model

SAME = ["num_collectors", "cpus_per_collector", "collector_inference_device", "ring_capacity", "utd_mode"]
SAME += ["max_ingest_per_iter", "weight_publish_interval", "weight_poll_interval"]


def run_config(context: TrainerContext) -> RunConfig:
    """Return our configuration for theirs; ``NUMA_COLLECTORS_<NAME>`` in the environment sets what theirs cannot name."""
    cfg, options, num_envs = context.rl_cfg, context.rl_cfg.trainer.async_options, context.num_envs
    for name, only in (("num_learners", 1), ("learner_cpu_cores", None), ("collector_cpu_cores", None)):
        if getattr(options, name) != only:
            text = "place by cpus_per_collector and NUMA_COLLECTORS_NUMA_NODES; a run has one learner"
            raise ConfigError(f"async_options.{name}: expected {only}, got {getattr(options, name)!r}; {text}")
    values: dict[str, Any] = {
        **{name: getattr(options, name) for name in SAME},
        "num_envs": num_envs,
        "total_env_steps": cfg.trainer.num_learning_iterations * num_envs,
        "learning_starts": cfg.agent.learning_starts * num_envs,
        "num_updates": cfg.agent.num_updates,
        "learner_device": cfg.device or "cuda",
        "seed": secrets.randbits(31) if context.seed is None else context.seed,
        "inline": not cfg.asynchronous,
        "run_dir": Path(context.run_dir) / "numa",
        "tensorboard": False,
        "log_interval_s": 2.0,
    }
    if not cfg.asynchronous:
        # Their synchronous trainer acts with the newest weights.
        values |= {"weight_publish_interval": 1, "weight_poll_interval": 1}
    return load_config(values)


class MotrixSink(TrainingLogger):
    """Our scalars under their tags, in their units and at their steps (iterations)."""

    def __init__(self, context: TrainerContext, config: RunConfig) -> None:
        super().__init__(context.run_dir, context.metrics)
        self._num_envs, self._num_updates = config.num_envs, config.num_updates
        lead_slots = config.effective_lead_slots or 1
        self._units = {"async/utd": config.num_envs, "async/ring_fill": lead_slots * config.num_collectors}
        self._units |= {f"async/ring_fill_collector{rank}": lead_slots for rank in range(config.num_collectors)}

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        iteration = step // self._num_envs
        # Per collector: ours end in /collector_<i>, theirs in _collector<i>.
        values = {t.replace("/collector_", "_collector") if t[-1].isdigit() else t: x for t, x in scalars.items()}
        values |= {tag: values[tag] * factor for tag, factor in self._units.items() if tag in values}
        values["async/weight_publishes_per_iter"] = values.get("async/weight_version", 0.0) / max(1, iteration)
        if rate := values.get("perf/env_steps_per_s"):
            values["perf/collector_wait_ms"] = 10.0 * values.get("wait/space_pct", 0.0) * self._num_envs / rate
        if rate := values.get("perf/updates_per_s"):
            values["perf/learn_ms_total"] = 10.0 * values["perf/learn_pct"] * self._num_updates / rate
        self.scalars(values, iteration, env_steps=step)


class Trainer(TheirTrainer):
    """Trains with a run of numa_collectors; playback is theirs."""

    def train(self) -> None:
        context, run_dir = self._context, Path(self._context.run_dir)
        config = run_config(context)
        task = Task.read(self._env_spec, self._rlcfg)
        if context.resume_from:
            config = config.replace(resume=str(take_over(Path(context.resume_from), config)))
        files = {"run_dir": run_dir, "save_interval": context.checkpoint.interval}
        trainer = FanOutTrainer(
            config,
            collector=partial(MotrixCollector, task=task),
            learner=partial(MotrixLearner, task=task, seed=config.seed, **files),
            schema=task.schema,
            weights=WeightSpec.like(task.policy().state_dict()),
            sinks=[MotrixSink(context, config)],
        )
        finished = False
        try:
            result = trainer.run()
            finished = result.status == "finished"
        finally:
            # Of a run that failed, the last good checkpoint; it is no best policy.
            path = checkpoint.latest(run_dir / "numa")
            if path is not None:
                save_model(checkpoint.load(path).state["learner"], run_dir, "latest.pt", best=finished)
        print(result.summary())
        if result.exit_code:
            raise SystemExit(result.exit_code)


def take_over(path: Path, config: RunConfig) -> Path:
    """Return a checkpoint of ours made from a model file of theirs, beside the run's own."""
    # Their files hold pickled optimiser states and are read as they read them: only resume from files you trust.
    state = torch.load(path, map_location="cpu", weights_only=False)
    progress = checkpoint.Progress(env_steps=state["global_step"] * config.num_envs, updates=state["update_idx"])
    content = {"learner": state, "rng": checkpoint.rng_state()}
    return checkpoint.save(Path(config.run_dir or ".") / "taken_over", content, progress)


class NumaFastSac(FastSacProvider):
    def create_trainer(self, context: TrainerContext) -> Trainer:
        return Trainer(context=context)


class NumaFramework(RlFramework):
    name = "numa"


def register() -> None:
    """Entry point in the group ``motrix_rl.frameworks``."""
    register_framework(NumaFramework([NumaFastSac()]))
