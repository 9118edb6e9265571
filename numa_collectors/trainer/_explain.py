"""The dry run: what a run would do, in words."""

from __future__ import annotations

from numa_collectors.binding import headroom_bytes
from numa_collectors.errors import NodeCapacityError
from numa_collectors.pool import MemoryPlan, bytes_by_node, check_memory, memory_plan
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
    topology, plans = setup.topology, _plans(setup)
    lines = [f"{region.name}: {_megabytes(region.num_bytes)} on {_node(region.node)}" for region in plans]
    needs = bytes_by_node(plans)
    for node, num_bytes in sorted(needs.items(), key=lambda item: -1 if item[0] is None else item[0]):
        if node is not None:
            lines.append(f"{_node(node)}: {_megabytes(num_bytes)} of {_megabytes(headroom_bytes(topology, node))} free")
    left = topology.memory_headroom_bytes
    limit = "no cgroup limit" if left is None else f"{_megabytes(left)} left under the cgroup's memory limit"
    have = _megabytes(headroom_bytes(topology, None))
    lines.append(f"together: {_megabytes(sum(needs.values()))} of {have} free on the nodes of this process, {limit}")
    return "\n".join(lines)


def _plans(setup: RunSetup) -> tuple[MemoryPlan, ...]:
    return memory_plan(setup.schema, setup.weights, setup.options, setup.placement)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f} MB"


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
    try:
        check_memory(_plans(setup), setup.topology, setup.options.memory_policy, risks.append)
    except NodeCapacityError as error:
        risks.append(f"run() will refuse to start: {error}")
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
