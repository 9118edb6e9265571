"""The dry run: what a run would do, in words."""

from __future__ import annotations

from numa_collectors.pool import memory_plan
from numa_collectors.trainer._setup import RunSetup

__all__ = ["explain"]


def explain(setup: RunSetup) -> str:
    """Return placement, memory a node, thread caps, seeds and risks of ``setup``."""
    parts = [
        _size(setup),
        "placement\n" + _indented(setup.placement.explain()),
        "shared memory\n" + _indented(_memory(setup)),
        "seeds\n" + _indented(_seeds(setup)),
        "risks\n" + _indented("\n".join(_risks(setup)) or "none seen"),
    ]
    return "\n\n".join(parts)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())


def _size(setup: RunSetup) -> str:
    config, options = setup.config, setup.options
    shards = "/".join(str(options.envs_of(rank)) for rank in range(options.num_collectors))
    lines = [
        f"{config.planned_env_steps:,} env steps with {config.num_envs} environments ({shards}) on {options.num_collectors} "
        f"collector(s), {options.quota_slots:,} slots each",
        f"updates: {config.utd_mode}, {config.num_updates} for every {config.num_envs} transitions after "
        f"{config.learning_starts:,} of warm-up; collectors lead by at most {config.effective_lead_slots} slots",
        f"learner on {setup.learner_device}, collectors infer on {options.device}",
    ]
    ranks = setup.ranks
    if ranks.world_size > 1:
        last = options.first_collector + options.num_collectors - 1
        lines.append(
            f"rank {ranks.rank} of {ranks.world_size} (local {ranks.local_rank} of {ranks.local_world_size}): collectors "
            f"{options.first_collector} to {last}; all counts are this rank's"
        )
    if setup.resume_from is not None:
        lines.append(
            f"resumes {setup.resume_from} at {setup.start.env_steps:,} env steps, {setup.start.updates:,} updates"
        )
    return "\n".join(lines)


def _memory(setup: RunSetup) -> str:
    needs: dict[int | None, int] = {}
    lines = []
    for region in memory_plan(setup.schema, setup.weights, setup.options, setup.placement):
        needs[region.node] = needs.get(region.node, 0) + region.num_bytes
        lines.append(f"{region.name}: {region.num_bytes / 1e6:.2f} MB on {_node(region.node)}")
    for node, num_bytes in sorted(needs.items(), key=lambda item: -1 if item[0] is None else item[0]):
        free = sum(
            entry.free_bytes + entry.reclaimable_bytes
            for entry in setup.topology.nodes
            if node is None or entry.id == node
        )
        lines.append(f"{_node(node)}: {num_bytes / 1e6:.2f} MB of {free / 1e6:,.0f} MB free")
    return "\n".join(lines)


def _node(node: int | None) -> str:
    return "any node" if node is None else f"node {node}"


def _seeds(setup: RunSetup) -> str:
    options = setup.options
    lines = [f"run: {options.seed}"]
    for rank in range(options.num_collectors):
        context = options.context(rank)
        lines.append(f"{context.name}: {context.seed}, first environment {context.env_seeds()[0]}")
    return "\n".join(lines)


def _risks(setup: RunSetup) -> list[str]:
    risks = list(setup.warnings)
    topology, options = setup.topology, setup.options
    if not topology.is_numa and options.num_collectors > 1:
        risks.append("this machine has one NUMA node: collectors get separate cores, and memory has no place to choose")
    workers = options.num_collectors + 1
    if topology.cpu_budget < workers:
        risks.append(
            f"{workers} processes share a budget of {topology.cpu_budget} CPU(s): the learner and the collectors take turns"
        )
    if options.on_collector_exit == "raise" and options.num_collectors > 8:
        risks.append("one dead collector ends the run (on_collector_exit=raise); with many collectors consider restart")
    return risks
