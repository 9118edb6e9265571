"""Topologies of synthetic and archived machines, discovered once a process, from memory rather than from a disk."""

from __future__ import annotations

import errno
import functools
import json
import os
import posixpath
import tarfile
from collections.abc import Mapping
from pathlib import Path

from numa_collectors.testing.machines.builder import Machine
from numa_collectors.testing.machines.catalogue import MACHINES
from numa_collectors.topo.discover import discover_root
from numa_collectors.topo.files import Root
from numa_collectors.topo.model import Topology

__all__ = ["archived_topology", "discover_machine", "read_archive", "topology_of"]

_PCI_LINKS = "sys/bus/pci/devices/"
_POLICY_LINKS = "/cpufreq"


class _MemoryRoot(Root):
    """A root whose files are in a dict: what a directory with these files would answer."""

    def __init__(self, machine: Machine) -> None:
        super().__init__("/nonexistent")
        self._denied = frozenset(machine.denied)
        self._files = machine.files
        self._children: dict[str, set[str]] = {}
        for path in (*machine.files, *machine.dangling):
            while path:
                parent, _, name = path.rpartition("/")
                siblings = self._children.setdefault(parent, set())
                if name in siblings:
                    break
                siblings.add(name)
                path = parent

    def read(self, relative: str) -> str | None:
        if relative in self._denied:
            self._note(relative, OSError(errno.EACCES, os.strerror(errno.EACCES)))
            return None
        text = self._files.get(relative)
        return None if text is None else text.replace("\0", "").strip()

    def names(self, relative: str) -> list[str]:
        return sorted(self._children.get(relative, ()))

    def exists(self, relative: str) -> bool:
        return relative in self._files or relative in self._children


def discover_machine(machine: Machine) -> Topology:
    """Return what discovery would find below ``machine.write(directory)``, without writing it."""
    return discover_root(_MemoryRoot(machine))


@functools.cache
def topology_of(name: str) -> Topology:
    """Return what discovery finds on the machine of that name in ``MACHINES``."""
    return discover_machine(MACHINES[name]())


def read_archive(archive: Path) -> Machine:
    """Return the machine in ``NAME.tar.xz``, whose ``NAME.json`` stands beside it.

    ``synthetic_proc_self_status`` of the JSON, where it is not null, becomes ``proc/self/status``.
    """
    name = archive.name.removesuffix(".tar.xz")
    facts = json.loads((archive.parent / f"{name}.json").read_text())
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    with tarfile.open(archive) as tar:
        for item in tar:
            path = item.name.removeprefix(f"{name}/")
            if item.issym():
                links[path] = posixpath.normpath(posixpath.join(posixpath.dirname(path), item.linkname))
            elif item.isfile() and (stream := tar.extractfile(item)) is not None:
                files[path] = stream.read().decode("latin-1")
    files |= _through_links(files, links)
    if facts["synthetic_proc_self_status"]:
        files["proc/self/status"] = facts["synthetic_proc_self_status"]
    return Machine(name, files)


def _through_links(files: Mapping[str, str], links: Mapping[str, str]) -> dict[str, str]:
    """Return the files of PCI devices and frequency policies under the names that sysfs links to them."""
    names: dict[str, list[str]] = {}
    for path, target in links.items():
        if path.startswith(_PCI_LINKS) or path.endswith(_POLICY_LINKS):
            names.setdefault(target, []).append(path)
    found = {}
    for path, text in files.items():
        directory, _, name = path.rpartition("/")
        for link in names.get(directory, ()):
            found[f"{link}/{name}"] = text
    return found


@functools.cache
def archived_topology(archive: Path) -> Topology:
    """Return what discovery finds on the machine in ``archive``."""
    return discover_machine(read_archive(archive))
