"""Everything that is decided before a process starts: placement, memory, devices, where to resume from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from numa_collectors import checkpoint
from numa_collectors.checkpoint import Progress
from numa_collectors.collector import CollectorFactory, check_picklable
from numa_collectors.config import RunConfig
from numa_collectors.errors import CheckpointError, ConfigError, PlacementError
from numa_collectors.learner import LearnerFactory, resolve_device
from numa_collectors.metrics import check_run_dir
from numa_collectors.placement import Placement, PlacementRequest, local_share, plan, unbound
from numa_collectors.pool import PoolOptions
from numa_collectors.rings import Schema, observation_pairs
from numa_collectors.snapshots import WeightSpec
from numa_collectors.topo import Topology
from numa_collectors.trainer._ranks import Ranks, resolve_ranks

__all__ = ["RunSetup", "prepare"]


@dataclass(frozen=True)
class RunSetup:
    """A run that has been thought through and not started."""

    config: RunConfig
    topology: Topology
    placement: Placement
    options: PoolOptions
    schema: Schema
    weights: WeightSpec
    learner_device: str
    warnings: tuple[str, ...]
    start: Progress
    generation: int
    resume_from: Path | None
    ranks: Ranks

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """What a resumed run must have unchanged."""
        return {"schema": f"{self.schema.fingerprint:016x}", "weights": f"{self.weights.fingerprint:016x}"}


def prepare(
    config: RunConfig, collector: CollectorFactory, learner: LearnerFactory, schema: Schema, weights: WeightSpec
) -> RunSetup:
    """Check everything that can be checked without starting anything; writes nothing.

    Raises ``ConfigError``, ``PlacementError`` or ``CheckpointError``.
    """
    if not isinstance(schema, Schema) or not isinstance(weights, WeightSpec):
        raise ConfigError(
            f"expected schema=Schema(...) and weights=WeightSpec(...), got {type(schema).__name__} and {type(weights).__name__}"
        )
    check_picklable(collector, "the collector factory")
    check_picklable(learner, "the learner factory")
    if config.ring_layout == "compact":
        observation_pairs(schema)
    ranks = resolve_ranks(config, os.environ)
    _check_ranks(config, ranks)
    learner_device, first = resolve_device(config.learner_device, ranks.local_rank)
    collector_device, second = resolve_device(config.collector_inference_device, ranks.local_rank)
    if config.run_dir is not None:
        check_run_dir(ranks.directory(config.run_dir), resume=config.resume is not None)
    topology = Topology.discover()
    placement = _place(config, topology, learner_device, ranks)
    start, generation, resume_from = _resume_point(config, {"schema": schema, "weights": weights})
    options = _pool_options(config, collector_device, start, generation, ranks)
    return RunSetup(
        config=config,
        topology=topology,
        placement=placement,
        options=options,
        schema=schema,
        weights=weights,
        learner_device=learner_device,
        warnings=tuple(
            f"{name}: {text}"
            for name, text in (("learner_device", first), ("collector_inference_device", second))
            if text is not None
        )
        + _resume_warnings(config, start, resume_from)
        + _rank_warnings(config, ranks),
        start=start,
        generation=generation,
        resume_from=resume_from,
        ranks=ranks,
    )


def _check_ranks(config: RunConfig, ranks: Ranks) -> None:
    if ranks.world_size == 1:
        return
    if config.run_dir is None:
        raise ConfigError(
            f"run_dir: expected a directory with world_size={ranks.world_size}, got null; the ranks of a run start at "
            "different moments and would each choose another: set run_dir"
        )
    if config.on_learner_exit == "restart":
        raise ConfigError(
            f"on_learner_exit: expected 'raise' with world_size={ranks.world_size}, got 'restart'; the other ranks would "
            "still be in a process group with the learner that died: set 'raise', and start all ranks again with resume=latest"
        )


def _rank_warnings(config: RunConfig, ranks: Ranks) -> tuple[str, ...]:
    equal = config.utd_mode == "strict" or (config.utd_min is not None and config.utd_min == config.utd_max)
    if ranks.world_size == 1 or equal:
        return ()
    return (
        "utd_mode=learner_bound: each rank makes as many updates as its time allows, so one that ends first leaves the others "
        "waiting in a collective of update(): use utd_mode=strict, or utd_min equal to utd_max",
    )


def _place(config: RunConfig, topology: Topology, learner_device: str, ranks: Ranks) -> Placement:
    device = torch.device(learner_device)
    gpu = (device.index or 0) if device.type == "cuda" else None
    if config.binding == "off" or config.inline:
        reason = "inline: one process, nothing is bound" if config.inline else "binding=off: nothing is bound"
        return unbound(config.num_collectors, reason)
    asked = config.placement_values(gpu)
    if ranks.local_world_size > 1:
        shared = _share(config, topology, ranks)
        # One collector that nothing was asked for is otherwise left unbound, on the cores of the other ranks too.
        asked["numa_nodes"] = asked["numa_nodes"] or "auto"
        return plan(shared, PlacementRequest(**asked))
    return plan(topology, PlacementRequest(**asked))


def _share(config: RunConfig, topology: Topology, ranks: Ranks) -> Topology:
    """Return the cores of this local rank; all of them where there are fewer than ranks and sharing was asked for."""
    try:
        return local_share(topology, ranks.local_rank, ranks.local_world_size)
    except PlacementError:
        if not config.oversubscribe:
            raise
        return topology


def _resume_point(config: RunConfig, specs: Mapping[str, Schema | WeightSpec]) -> tuple[Progress, int, Path | None]:
    """Return where the run starts: its counts, the generation of its collectors, the checkpoint."""
    if config.resume is None:
        return Progress(env_steps=0, updates=0), 0, None
    source = config.run_dir if config.resume == "latest" else Path(config.resume)
    assert source is not None
    loaded = checkpoint.read_manifest(source)
    checkpoint.check_matches(loaded, {name: f"{spec.fingerprint:016x}" for name, spec in specs.items()})
    if loaded.progress.env_steps >= config.planned_env_steps:
        raise CheckpointError(
            f"expected a checkpoint before total_env_steps={config.planned_env_steps}, got {loaded.progress.env_steps} env "
            f"steps in {loaded.path}; that run is complete: raise total_env_steps to continue it"
        )
    generations = [int(counters.get("generation", 0)) for counters in loaded.progress.collectors.values()]
    return loaded.progress, max(generations, default=0) + 1, loaded.path


def _resume_warnings(config: RunConfig, start: Progress, resume_from: Path | None) -> tuple[str, ...]:
    left = config.planned_env_steps - start.env_steps
    if resume_from is None or config.learning_starts < left:
        return ()
    return (
        f"learning_starts={config.learning_starts} is no less than the {left} env steps that are left: unless the checkpoint "
        "holds the replay memory, this session makes no update",
    )


def _pool_options(config: RunConfig, device: str, start: Progress, generation: int, ranks: Ranks) -> PoolOptions:
    left = config.planned_env_steps - start.env_steps
    return PoolOptions(
        num_envs=config.num_envs,
        num_collectors=config.num_collectors,
        seed=config.seed,
        quota_slots=-(-left // config.num_envs),
        ring_capacity=config.ring_capacity,
        ring_max_bytes=config.ring_max_bytes,
        ring_layout=config.ring_layout,
        max_lead_slots=config.effective_lead_slots,
        weight_poll_interval=config.weight_poll_interval,
        max_policy_lag=config.max_policy_lag,
        # A resumed policy acts from its first step; its buffer fills with its own data.
        learning_starts_slots=0 if generation else -(-config.learning_starts // config.num_envs),
        check_finite=config.check_finite,
        device=device,
        binding=config.binding,
        memory_policy=config.memory_policy,
        huge_pages=config.huge_pages,
        on_collector_exit=config.on_collector_exit,
        on_learner_exit=config.on_learner_exit,
        min_collectors=config.min_collectors,
        max_restarts=config.max_restarts,
        restart_backoff_s=config.restart_backoff_s,
        hang_timeout_s=config.hang_timeout_s,
        start_timeout_s=config.start_timeout_s,
        shutdown_timeout_s=config.shutdown_timeout_s,
        generation=generation,
        learner_rank=ranks.rank,
        num_learners=ranks.world_size,
    )
