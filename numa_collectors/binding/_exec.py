"""Becoming another program on a node: what numactl does, without numactl."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import NoReturn

from numa_collectors._cpulist import format_cpulist
from numa_collectors.binding._apply import apply
from numa_collectors.binding._caps import thread_caps
from numa_collectors.binding._request import BindMode, BindPolicy, BindRequest
from numa_collectors.errors import PlacementError
from numa_collectors.topo.model import Topology

__all__ = ["exec_bound", "request_for"]


def exec_bound(argv: Sequence[str], request: BindRequest) -> NoReturn:
    """Bind the calling thread and replace this process by ``argv``, found on the path; call it from the main thread.

    The program starts with mask, memory policy and thread caps in place.  Raises ``BindingError`` (see :func:`apply`), and
    ``OSError`` if there is no such program; the thread is then bound as before.
    """
    if not argv:
        raise ValueError("expected a command to run, got none")
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, "no such command on the path", argv[0])
    apply(request)
    environment = {**os.environ, **thread_caps(request.num_threads)}
    try:
        os.execve(program, list(argv), environment)
    except BaseException:
        apply(BindRequest())
        raise


def request_for(
    topology: Topology,
    *,
    node: int | None = None,
    cpus: Sequence[int] | None = None,
    gpu: int | None = None,
    policy: BindPolicy = "preferred",
    mode: BindMode = "auto",
    env: Mapping[str, str] | None = None,
) -> BindRequest:
    """Return the request for a node, for the node of a visible GPU (by its ordinal), or for a set of CPUs.

    A node without memory gets its nearest node with memory; a node without CPUs binds memory alone.  With ``cpus`` the
    memory is that of their nodes.  Raises ``PlacementError``.
    """
    if gpu is not None:
        node = _gpu_node(topology, gpu, os.environ if env is None else env)
    if cpus is not None:
        chosen = tuple(cpus)
        nodes = tuple(sorted({found for cpu in chosen if (found := topology.node_of_cpu(cpu)) is not None}))
    elif node is not None:
        chosen = tuple(cpu for cpu in topology.node(node).cpus if cpu in topology.allowed)
        if topology.node(node).cpus and not chosen:
            raise PlacementError(
                f"expected a node with CPUs that this process may use ({format_cpulist(topology.allowed)}), got node "
                f"{node} with {format_cpulist(topology.node(node).cpus)}; widen its mask (taskset, cpuset)"
            )
        nodes = (node,)
    else:
        raise PlacementError("expected a node, a set of CPUs or a GPU to be near to, got none of them")
    memory = tuple(sorted({_memory_for(topology, one) for one in nodes}))
    return BindRequest(
        cpus=chosen or None, memory_nodes=memory or None, policy=policy, mode=mode, num_threads=len(chosen) or None
    )


def _gpu_node(topology: Topology, gpu: int, env: Mapping[str, str]) -> int:
    visible = topology.visible_gpus(env)
    if not 0 <= gpu < len(visible):
        raise PlacementError(f"expected one of {len(visible)} visible GPUs, got gpu:{gpu}; see CUDA_VISIBLE_DEVICES")
    node = visible[gpu].node
    if node is None:
        raise PlacementError(
            f"the kernel does not know the NUMA node of gpu:{gpu} ({visible[gpu].pci}); name a node instead"
        )
    return node


def _memory_for(topology: Topology, node: int) -> int:
    """Return ``node`` if it has memory for this process, else the nearest node that has."""
    usable = [
        one.id for one in topology.nodes if one.kind in ("normal", "memory-only") and one.id in topology.nodes_allowed
    ]
    if not usable:
        raise PlacementError("expected a node with memory that this process may use, got none")
    if node in usable:
        return node
    return min(usable, key=lambda one: (topology.distance(node, one) or 1 << 20, one))
