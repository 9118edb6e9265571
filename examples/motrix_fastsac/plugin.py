"""The framework ``numa`` of mxlab: their configuration in, a run of ours, their files out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from motrix_env_core import registry
from motrix_rl import checkpoints, frameworks
from motrix_rl.contracts import RlFramework, TrainerBase, TrainerContext
from motrix_rl.training_logger import TrainingLogger
from motrix_rl_builtin.fastsac.config import FastSacCfg
from motrix_rl_builtin.fastsac.framework import FastSacProvider

from numa_collectors import checkpoint
from numa_collectors.config import RunConfig, load_config
from numa_collectors.errors import ConfigError
from numa_collectors.snapshots import WeightSpec
from numa_collectors.trainer import FanOutTrainer, RunFailedError

from .collector import EnvShape, MotrixCollector, policy_tensors
from .learner import MotrixLearner, save_model

_RATES = ("wait/space_pct", "perf/env_steps_per_s", "perf/updates_per_s")


def run_config(context: TrainerContext[FastSacCfg], env: Mapping[str, str] | None = None) -> RunConfig:
    """Return our configuration for theirs; ``NUMA_COLLECTORS_<NAME>`` in ``env`` sets what theirs has no name for.

    ``asynchronous=false`` is our inline mode.
    """
    cfg, options = context.rl_cfg, context.rl_cfg.trainer.async_options
    for name, only in (("num_learners", 1), ("learner_cpu_cores", None), ("collector_cpu_cores", None)):
        if getattr(options, name) != only:
            text = "place by cpus_per_collector and NUMA_COLLECTORS_NUMA_NODES; a run has one learner"
            raise ConfigError(f"async_options.{name}: expected {only}, got {getattr(options, name)!r}; {text}")
    values: dict[str, Any] = {name: getattr(options, name) for name in RunConfig.model_fields if hasattr(options, name)}
    values |= {
        "num_envs": context.num_envs,
        "total_env_steps": cfg.trainer.num_learning_iterations * context.num_envs,
        "learning_starts": cfg.agent.learning_starts * context.num_envs,
        "num_updates": cfg.agent.num_updates,
        "learner_device": cfg.device or "cuda",
        "seed": secrets.randbits(31) if context.seed is None else context.seed,
        "inline": not cfg.asynchronous,
        **{"run_dir": Path(context.run_dir) / "numa", "tensorboard": False, "log_interval_s": 2.0},
    }
    if not cfg.asynchronous:
        # Their synchronous trainer acts with the newest weights.
        values |= {"weight_publish_interval": 1, "weight_poll_interval": 1}
    return load_config(values, env=env)


class MotrixSink:
    """Our scalars under their tags, in their units and at their steps (iterations), through their logger."""

    def __init__(self, log: TrainingLogger, config: RunConfig) -> None:
        self._log, self._config, self._last = log, config, (0, 0.0)

    def write(self, scalars: Mapping[str, float], step: int, wall_time: float) -> None:
        num_envs, values, iteration = self._config.num_envs, dict(scalars), step // self._config.num_envs
        factors = {"async/utd": num_envs, "async/ring_fill": self._config.effective_lead_slots or 1}
        values |= {name: value * factors.get(name[:15], 1) for name, value in values.items()}
        version = values.get("async/weight_version", 0.0)
        values["async/weight_publishes_per_iter"] = (version - self._last[1]) / max(1, iteration - self._last[0])
        self._last = (iteration, version)
        waiting, rate, updates = (values.get(tag, 0.0) for tag in _RATES)
        if rate and updates:
            values["perf/collector_wait_ms"] = 10.0 * waiting * num_envs / rate
            values["perf/learn_ms_total"] = 10.0 * values["perf/learn_pct"] * self._config.num_updates / updates
        self._log.scalars(values, iteration, env_steps=step)

    def close(self) -> None:
        self._log.close()


class Trainer(TrainerBase):
    """A run of numa_collectors behind their trainer's interface."""

    def __init__(self, context: TrainerContext[FastSacCfg]) -> None:
        self._context = context

    def train(self) -> None:
        context, cfg, run_dir = self._context, self._context.rl_cfg, Path(self._context.run_dir)
        spec = registry.resolve(context.env_name, sim=context.sim)
        shape = EnvShape.of(spec)
        config = run_config(context)
        weights = WeightSpec.like(policy_tensors(*shape.policy(cfg.agent, torch.device("cpu"))))
        if context.resume_from:
            fingerprints = {"schema": f"{shape.schema.fingerprint:016x}", "weights": f"{weights.fingerprint:016x}"}
            config = config.replace(resume=str(take_over(Path(context.resume_from), config, fingerprints)))
        both = {"cfg": cfg, "shape": shape}
        own = {"seed": config.seed, "run_dir": run_dir, "save_interval": context.checkpoint.interval}
        trainer = FanOutTrainer(
            config,
            collector=partial(MotrixCollector, spec=spec, inline=config.inline, **both),
            learner=partial(MotrixLearner, **own, **both),
            schema=shape.schema,
            weights=weights,
            sinks=[MotrixSink(TrainingLogger(run_dir, context.metrics), config)],
        )
        try:
            result = trainer.run()
        except RunFailedError as error:
            self._keep(error.result.checkpoint if error.result else None, best=False)
            raise
        self._keep(result.checkpoint, best=result.status == "finished")
        print(result.summary())
        if result.exit_code:
            raise SystemExit(result.exit_code)

    def _keep(self, path: Path | None, *, best: bool) -> None:
        """Write ``latest.pt`` from a checkpoint of ours; only a run that reached its target is entered as best policy."""
        run_dir = Path(self._context.run_dir)
        path = path or checkpoint.latest(run_dir / "numa")
        if path is not None:
            state = checkpoint.load(path).state["learner"]
            save_model(state, checkpoints.final_checkpoint_path("pt", run_dir), run_dir, best=best)

    def play(self, policy: str) -> None:
        from motrix_rl_builtin.fastsac.sync.train import Trainer as TheirTrainer

        TheirTrainer(context=self._context).play(policy)


def take_over(path: Path, config: RunConfig, fingerprints: Mapping[str, str]) -> Path:
    """Return a checkpoint of ours made from a model file of theirs, beside the run's own."""
    # Their files hold pickled optimiser states and are read as they read them: only resume from files you trust.
    state = torch.load(path, map_location="cpu", weights_only=False)
    progress = checkpoint.Progress(env_steps=state["global_step"] * config.num_envs, updates=state["update_idx"])
    assert config.run_dir is not None
    content = {"learner": state, "rng": checkpoint.rng_state()}
    return checkpoint.save(config.run_dir / "taken_over", content, progress, fingerprints=fingerprints)


class NumaFastSac(FastSacProvider):
    """Their provider with our trainer."""

    def create_trainer(self, context: TrainerContext[FastSacCfg]) -> TrainerBase:
        return Trainer(context)


class NumaFramework(RlFramework):
    def __init__(self) -> None:
        super().__init__((NumaFastSac(),))

    @property
    def name(self) -> str:
        return "numa"


def register() -> None:
    """Entry point in the group ``motrix_rl.frameworks``."""
    frameworks.register_framework(NumaFramework())
