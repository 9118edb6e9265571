"""PCI devices, and what GPU drivers say about theirs, without opening a device.

Sources: Documentation/ABI/testing/sysfs-bus-pci (``numa_node`` is -1 where firmware says nothing, ``local_cpulist``),
NVIDIA's ``/proc/driver/nvidia/gpus/*/{information,numa_status}``, AMD's
``/sys/class/kfd/kfd/topology/nodes/*/properties``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from numa_collectors.topo.files import Root
from numa_collectors.topo.model import Device, Node

__all__ = ["DriverGpu", "read_devices", "read_kfd_gpus", "read_nvidia_gpus"]

AMD = "0x1002"
INTEL = "0x8086"
NVIDIA = "0x10de"

_PCI = "sys/bus/pci/devices"
_NVIDIA = "proc/driver/nvidia/gpus"
_KFD = "sys/class/kfd/kfd/topology/nodes"
_PCI_ADDRESS = re.compile(r"^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$", re.IGNORECASE)
# PCI base classes, PCI Code and ID Assignment Specification 1.1, section 1.
_KINDS = {"01": "storage", "02": "nic", "06": "bridge", "12": "accelerator"}


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """What a driver says of one GPU; ``memory_node`` is the NUMA node that its memory was onlined as."""

    uuid: str | None = None
    minor: int | None = None
    model: str | None = None
    memory_node: int | None = None
    has_device_file: bool = True


def read_nvidia_gpus(root: Root) -> dict[str, DriverGpu]:
    """Return what NVIDIA's driver lists, by PCI address; empty where the driver is not loaded or is masked."""
    device_files = {name for name in root.names("dev") if re.fullmatch(r"nvidia\d+", name)}
    gpus = {}
    for address in root.names(_NVIDIA):
        information = _colon_fields(root.read(f"{_NVIDIA}/{address}/information"))
        numa = _colon_fields(root.read(f"{_NVIDIA}/{address}/numa_status"))
        minor = _number(information.get("Device Minor"))
        gpus[address.lower()] = DriverGpu(
            information.get("GPU UUID"),
            minor,
            information.get("Model"),
            _number(numa.get("Node")),
            not device_files or minor is None or f"nvidia{minor}" in device_files,
        )
    return gpus


def read_kfd_gpus(root: Root) -> dict[str, DriverGpu]:
    """Return what AMD's compute driver lists, by PCI address, in its own order."""
    gpus = {}
    for number in root.numbered(_KFD, ""):
        text = root.read(f"{_KFD}/{number}/properties") or ""
        properties = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
        location = _number(properties.get("location_id"))
        # A node with no SIMDs is a CPU.
        if not location or _number(properties.get("simd_count")) == 0:
            continue
        domain = _number(properties.get("domain")) or 0
        address = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"
        unique = _number(properties.get("unique_id"))
        gpus[address] = DriverGpu(f"GPU-{unique:016x}" if unique else None, number)
    return gpus


def read_devices(
    root: Root, nodes: Sequence[Node], nvidia: Mapping[str, DriverGpu], kfd: Mapping[str, DriverGpu]
) -> tuple[Device, ...]:
    """Return the PCI devices by rising address, GPUs with what their drivers add."""
    by_cpus = {frozenset(node.cpus): node.id for node in nodes if node.cpus}
    ids = {node.id for node in nodes}
    devices = [
        _read_device(root, name, by_cpus, ids, nvidia.get(name.lower()) or kfd.get(name.lower()))
        for name in root.names(_PCI)
        if _PCI_ADDRESS.match(name)
    ]
    present = {device.pci for device in devices}
    # A container may mask sysfs and still show the driver's own directory.
    devices += [
        _with_driver(Device(address, "0x030200", NVIDIA, "", "gpu"), gpu)
        for address, gpu in nvidia.items()
        if address not in present
    ]
    listed = bool(nvidia)
    return tuple(
        replace(device, usable=False)
        if listed and device.kind == "gpu" and device.vendor == NVIDIA and device.pci not in nvidia
        else device
        for device in sorted(devices, key=lambda device: pci_key(device.pci))
    )


def pci_key(address: str) -> tuple[int, ...]:
    """Return a key that sorts PCI addresses as numbers, whatever the width of the domain."""
    match = _PCI_ADDRESS.match(address)
    return tuple(int(part, 16) for part in match.groups()) if match else (1 << 64,)


def _read_device(
    root: Root, name: str, by_cpus: Mapping[frozenset[int], int], nodes: set[int], gpu: DriverGpu | None
) -> Device:
    directory = f"{_PCI}/{name}"
    class_id = root.read(f"{directory}/class") or ""
    vendor = root.read(f"{directory}/vendor") or ""
    device_id = root.read(f"{directory}/device") or ""
    node = root.integer(f"{directory}/numa_node")
    if node is None or node < 0 or node not in nodes:
        node = _node_of_local_cpus(root, directory, by_cpus)
    device = Device(name.lower(), class_id, vendor, device_id, _kind(class_id, vendor, gpu is not None), node)
    return device if gpu is None else _with_driver(device, gpu)


def _node_of_local_cpus(root: Root, directory: str, by_cpus: Mapping[frozenset[int], int]) -> int | None:
    """Return the node whose CPUs are exactly the device's local ones; all CPUs of a machine name no node."""
    if len(by_cpus) < 2:
        return None
    local = root.cpulist(f"{directory}/local_cpulist")
    if local is None:
        local = root.cpumap(f"{directory}/local_cpus")
    if not local:
        return None
    online = frozenset().union(*by_cpus)
    return by_cpus.get(online & frozenset(local))


def _kind(class_id: str, vendor: str, has_driver: bool) -> str:
    base = class_id.removeprefix("0x")[:2].lower()
    if has_driver or (base in ("03", "12") and vendor in (AMD, NVIDIA)) or (base == "03" and vendor == INTEL):
        return "gpu"
    return "display" if base == "03" else _KINDS.get(base, "other")


def _with_driver(device: Device, gpu: DriverGpu) -> Device:
    return replace(
        device,
        uuid=gpu.uuid,
        minor=gpu.minor,
        model=gpu.model,
        memory_node=gpu.memory_node,
        usable=gpu.has_device_file,
    )


def _colon_fields(text: str | None) -> dict[str, str]:
    fields = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d+", text.strip()) else None
