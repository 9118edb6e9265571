"""What a machine's description says about how it should be set up, each with its remedy.

Pure: a topology and an environment in, advice out.  :mod:`numa_collectors.topo.live` adds what only the running
machine can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from numa_collectors._cpulist import format_cpulist
from numa_collectors.topo.gpus import order_is_known
from numa_collectors.topo.model import Topology

__all__ = ["Advice", "advise"]


@dataclass(frozen=True, slots=True)
class Advice:
    """``code`` is stable.  A note has nothing to be done about it and does not change the exit code."""

    code: str
    text: str
    remedy: str | None = None

    @property
    def is_note(self) -> bool:
        return self.remedy is None


def advise(topology: Topology, env: Mapping[str, str]) -> tuple[Advice, ...]:
    """Return what there is to say, the most consequential first."""
    return (*_limits(topology), *_kernel(topology), *_devices(topology, env), *_shape(topology))


def _limits(topology: Topology) -> Iterator[Advice]:
    allowed = set(topology.allowed)
    no_cpus = [node.id for node in topology.nodes if node.cpus and not allowed & set(node.cpus)]
    if no_cpus:
        yield Advice(
            "cpuset-hides-cpus",
            f"none of the CPUs of node {format_cpulist(no_cpus)} may be used: affinity or cpuset leave CPUs "
            f"{format_cpulist(allowed)}",
            "widen it: docker --cpuset-cpus, Slurm --cpus-per-task, cpuset.cpus of the cgroup, or taskset",
        )
    no_memory = [node.id for node in topology.nodes if node.memory_bytes and node.id not in topology.nodes_allowed]
    no_memory = [node for node in no_memory if topology.node(node).kind != "device"]
    if no_memory:
        yield Advice(
            "cpuset-hides-memory",
            f"the memory of node {format_cpulist(no_memory)} may not be used (Mems_allowed is "
            f"{format_cpulist(topology.nodes_allowed)})",
            "widen it: docker --cpuset-mems, or cpuset.mems of the cgroup",
        )
    if topology.cpu_budget < len(topology.allowed):
        yield Advice(
            "quota-below-cpuset",
            f"a CPU quota gives {topology.cpu_budget} CPUs' worth of time, but {len(topology.allowed)} CPUs are allowed: "
            "threads on all of them are throttled together",
            "give whole CPUs instead of a quota (Kubernetes: static CPU manager; docker: --cpuset-cpus without --cpus), "
            "or raise the quota",
        )
    isolated = allowed & set(topology.isolated)
    if isolated:
        yield Advice(
            "isolated-cpus",
            f"CPUs {format_cpulist(isolated)} are isolated: the scheduler moves no thread onto or off them by itself, so a "
            "worker's threads pile up on one of them",
            "leave them out (taskset), or boot without isolcpus",
        )


def _kernel(topology: Topology) -> Iterator[Advice]:
    if topology.is_numa and topology.kernel.get("numa_balancing") not in (None, 0):
        yield Advice(
            "numa-balancing",
            "automatic NUMA balancing is on: it unmaps pages to watch them, which costs time, and moves shared ones",
            "sysctl -w kernel.numa_balancing=0 while placed workers run",
        )


def _devices(topology: Topology, env: Mapping[str, str]) -> Iterator[Advice]:
    unknown = [device.pci for device in topology.devices if device.kind == "gpu" and device.node is None]
    if unknown and topology.is_numa:
        yield Advice(
            "gpu-locality-unknown",
            f"the kernel does not know the node of GPU {', '.join(unknown)}",
            "name the learner's node yourself (learner_node); the firmware's setting is often called 'ACPI SRAT' or, in a "
            "VM, PCI-to-node affinity",
        )
    if not order_is_known(topology, env):
        yield Advice(
            "gpu-order-unknown",
            "the GPUs are of several models and CUDA orders them by speed, which no file tells",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _shape(topology: Topology) -> Iterator[Advice]:
    if topology.problems:
        listed = "; ".join(topology.problems[:3]) + ("; ..." if len(topology.problems) > 3 else "")
        yield Advice(
            "unreadable",
            f"{len(topology.problems)} things could not be read or make no sense: {listed}",
            "look at them outside the container, or as another user",
        )
    cpu_only = [node.id for node in topology.nodes if node.kind == "cpu-only"]
    if cpu_only:
        yield Advice(
            "no-local-memory", f"node {format_cpulist(cpu_only)} has CPUs and no memory: all its memory is remote"
        )
    if topology.synthesized:
        yield Advice("no-numa-directory", "the kernel describes no NUMA nodes: one node was made of everything")
    if not topology.is_numa:
        yield Advice(
            "one-node",
            "one node has both CPUs and memory: there is no remote memory to avoid here; keeping workers apart on cores of "
            "their own still helps",
        )
