"""Which GPUs are visible, in which order, from the environment."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from numa_collectors.testing.machines import topology_of
from numa_collectors.topo import Device, Topology
from numa_collectors.topo.gpus import order_is_known

ALL = tuple(range(8))
# UUIDs of GPU k on the 8-GPU machine: GPU-0000000k-1111-2222-3333-44445555666k.
FULL = [f"GPU-{k:08x}-1111-2222-3333-44445555666{k}" for k in range(8)]

CUDA = [
    (None, ALL),
    ("", ()),
    ("0", (0,)),
    ("7", (7,)),
    ("0,1", (0, 1)),
    ("3,1,2", (3, 1, 2)),
    ("7,6,5,4,3,2,1,0", (7, 6, 5, 4, 3, 2, 1, 0)),
    (" 2 , 3 ", (2, 3)),
    ("02", (2,)),
    ("+1", (1,)),
    ("-1", ()),
    ("0,-1,2", (0,)),
    ("8", ()),
    ("1,8,2", (1,)),
    ("1,99999999999999999999,2", (1,)),
    ("0,0", ()),
    ("0,1,0", ()),
    ("all", ()),
    ("none", ()),
    ("NoDevFiles", ()),
    ("void", ()),
    ("1gpu2,2ampere", (1, 2)),
    ("0x1", (0,)),
    ("1,,2", (1,)),
    (",1", ()),
    ("1;2", (1,)),
    ("0-3", (0,)),
    (FULL[5], (5,)),
    (f"{FULL[5]},{FULL[2]}", (5, 2)),
    ("GPU-00000003", (3,)),
    ("GPU-00000003,GPU-00000001", (3, 1)),
    ("GPU-", ()),
    ("GPU-0000000", ()),
    ("GPU-deadbeef", ()),
    ("GPU-00000003,GPU-deadbeef,GPU-00000001", (3,)),
    ("GPU-00000003,GPU-00000003-1111", ()),
    ("GPU-00000003,1", (3,)),
    ("1,GPU-00000003", (1,)),
    ("gpu-00000003", ()),
    (f"MIG-{FULL[4]}/1/0", (4,)),
    (f"MIG-{FULL[4]}/1", (4,)),
    (f"MIG-{FULL[4]}/1/0,MIG-{FULL[5]}/1/0", (4,)),
    ("MIG-GPU-deadbeef-0000-0000-0000-000000000000/1/0", ()),
    ("MIG-rubbish!", ()),
    ("MIG-", ()),
]


def ordinals(topology: Topology, env: dict[str, str]) -> tuple[int, ...]:
    gpus = [device for device in topology.devices if device.kind == "gpu" and device.usable]
    return tuple(gpus.index(gpu) for gpu in topology.visible_gpus(env))


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID", "FASTEST_FIRST"])
@pytest.mark.parametrize(("value", "expected"), CUDA)
def test_cuda_visible_devices(value: str | None, expected: tuple[int, ...], order: str | None) -> None:
    env = {
        name: text for name, text in (("CUDA_VISIBLE_DEVICES", value), ("CUDA_DEVICE_ORDER", order)) if text is not None
    }
    assert ordinals(topology_of("epyc-nps4-8gpu"), env) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ALL),
        ({"HIP_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, (3, 1)),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"}, (6, 4)),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "3"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "2"}, (2,)),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, (1,)),
        ({"ROCR_VISIBLE_DEVICES": ""}, ()),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ()),
        ({"HIP_VISIBLE_DEVICES": "rubbish"}, ()),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1234567890ab0005"}, (5,)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1234567890ab0005,GPU-1234567890ab0002", "HIP_VISIBLE_DEVICES": "1"}, (2,)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-ffff"}, ()),
    ],
)
def test_amd(env: dict[str, str], expected: tuple[int, ...]) -> None:
    assert ordinals(topology_of("mi300x"), env) == expected


def test_a_container_counts_its_own_gpus() -> None:
    topology = topology_of("container-two-gpus")
    assert [gpu.minor for gpu in topology.visible_gpus({})] == [3, 6]
    assert [gpu.node for gpu in topology.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"})] == [1]
    assert sum(device.kind == "gpu" for device in topology.devices) == 8


def test_unknown_node_stays_unknown() -> None:
    assert [gpu.node for gpu in topology_of("gpu-unknown-node").visible_gpus({})] == [None, None]


def test_mig_name_without_its_gpu() -> None:
    mig = {"CUDA_VISIBLE_DEVICES": "MIG-11111111-2222-3333-4444-555555555555"}
    (gpu,) = topology_of("epyc-nps4-8gpu").visible_gpus(mig)
    assert (gpu.pci, gpu.node) == ("unknown", None)
    (gpu,) = topology_of("gh200").visible_gpus(mig)
    assert gpu.node == 0


def test_order_of_unlike_gpus_is_unknown() -> None:
    topology = topology_of("gpu-unknown-node")
    assert order_is_known(topology, {})
    unlike = Device("0000:09:00.0", "0x030000", "0x10de", "0x1111", "gpu")
    mixed = dataclasses.replace(topology, devices=(*topology.devices, unlike))
    assert not order_is_known(mixed, {})
    assert order_is_known(mixed, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})


def test_no_display_is_a_gpu() -> None:
    assert {device.kind for device in topology_of("mi300x").devices if device.vendor == "0x1a03"} == {"display"}


def test_no_driver_is_loaded() -> None:
    program = (
        "import sys; from numa_collectors.topo import Topology; Topology.discover().visible_gpus(); "
        "loaded = {'torch', 'numpy', 'pydantic', 'ctypes'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
