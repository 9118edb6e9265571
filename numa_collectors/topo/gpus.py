"""Which GPUs a program sees, and in which order, from the environment it is started with.

CUDA (CUDA C++ Programming Guide, "CUDA Environment Variables"): ``CUDA_VISIBLE_DEVICES`` is a list of indices, or of
UUIDs ``GPU-...`` that may be cut short as long as they stay unique, or of MIG names; the first entry that is none of
these ends the list.  A repeated entry leaves nothing, and text after an index is ignored (``1gpu2`` is 1), as
``strtoul`` reads it. ``CUDA_DEVICE_ORDER`` is ``FASTEST_FIRST`` (default) or ``PCI_BUS_ID``; among equal GPUs the
fastest-first order is that of the bus, and among unequal ones no file says it, so the bus order is used.

HIP (ROCm documentation, "GPU isolation techniques"): ``ROCR_VISIBLE_DEVICES`` selects first, then
``HIP_VISIBLE_DEVICES`` (or, without it, ``CUDA_VISIBLE_DEVICES``) selects among what is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from numa_collectors.topo.devices import AMD, NVIDIA
from numa_collectors.topo.model import Device, Topology

__all__ = ["order_is_known", "visible_gpus"]

_INDEX = re.compile(r"\s*([+-]?\d+)")
# MIG-GPU-<uuid of the GPU>/<gpu instance>/<compute instance>, the form of drivers before 470.
_OLD_MIG = re.compile(r"^MIG-(GPU-[0-9a-fA-F-]+)(?:/\d+){0,2}$")


def visible_gpus(topology: Topology, env: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the visible GPUs in ordinal order: NVIDIA's where there are any, else AMD's.

    A MIG instance is the GPU that it is part of.  Where its name does not say which (``MIG-<uuid>``), the device
    returned has the address ``"unknown"`` and the node that all candidates share, or None.
    """
    nvidia = _usable(topology, NVIDIA)
    if nvidia:
        # Naming several MIG instances is allowed, but CUDA enumerates one compute instance only.
        return _select_cuda(nvidia, env.get("CUDA_VISIBLE_DEVICES"))
    amd = _usable(topology, AMD)
    amd = _select(amd, env.get("ROCR_VISIBLE_DEVICES"))
    return _select(amd, env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES")))


def order_is_known(topology: Topology, env: Mapping[str, str]) -> bool:
    """Return False where CUDA would order unequal GPUs by a speed that no file tells."""
    models = {(gpu.vendor, gpu.device, gpu.model) for gpu in _usable(topology, NVIDIA)}
    return len(models) < 2 or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _usable(topology: Topology, vendor: str) -> tuple[Device, ...]:
    gpus = [device for device in topology.devices if device.kind == "gpu" and device.usable]
    if vendor == NVIDIA:
        return tuple(gpu for gpu in gpus if gpu.vendor in (NVIDIA, "", "0x0000"))
    return tuple(gpu for gpu in gpus if gpu.vendor == vendor)


def _select_cuda(gpus: tuple[Device, ...], text: str | None) -> tuple[Device, ...]:
    if text is not None and text.startswith("MIG-"):
        return _select_mig(gpus, text)
    return _select(gpus, text)


def _select(gpus: tuple[Device, ...], text: str | None) -> tuple[Device, ...]:
    """Apply one list of indices or UUIDs."""
    if text is None:
        return gpus
    by_uuid = text.startswith("GPU-")
    chosen: list[int] = []
    for entry in text.split(","):
        index = _by_uuid(gpus, entry) if by_uuid else _by_index(gpus, entry)
        if index is None:
            break
        if index in chosen:
            return ()
        chosen.append(index)
    return tuple(gpus[index] for index in chosen)


def _by_index(gpus: Sequence[Device], entry: str) -> int | None:
    match = _INDEX.match(entry)
    index = int(match.group(1)) if match else -1
    return index if 0 <= index < len(gpus) else None


def _by_uuid(gpus: Sequence[Device], entry: str) -> int | None:
    """Return the one GPU whose UUID begins with ``entry``; None where none or several do."""
    matches = [index for index, gpu in enumerate(gpus) if gpu.uuid is not None and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 and entry.startswith("GPU-") and len(entry) > len("GPU-") else None


def _select_mig(gpus: tuple[Device, ...], text: str) -> tuple[Device, ...]:
    entry = text.split(",")[0].strip()
    old = _OLD_MIG.match(entry)
    if old:
        index = _by_uuid(gpus, old.group(1))
        return () if index is None else (gpus[index],)
    if not re.fullmatch(r"MIG-[0-9a-fA-F-]+", entry):
        return ()
    if len(gpus) == 1:
        return gpus
    nodes = {gpu.node for gpu in gpus}
    common = nodes.pop() if len(nodes) == 1 else None
    return (replace(gpus[0], pci="unknown", node=common, uuid=entry, minor=None, memory_node=None),)
