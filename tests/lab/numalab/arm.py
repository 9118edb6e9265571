"""The aarch64 guest's disk: Debian's interpreter for aarch64 and wheels that pip picks for that platform.

Nothing of it runs on the host; packages are unpacked, not installed, and need no root rights.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

from numalab.boot import Guest
from numalab.cache import cache_dir, command, kernel, locked, need_tool, prune, unpack_packages
from numalab.errors import Unavailable
from numalab.image import DISTRIBUTIONS, make_filesystem, write_etc
from numalab.topologies import GuestTopology

__all__ = ["arm_guest"]

_PACKAGES = ("python3", "numactl", "libnuma1", "libc-bin", "libstdc++6", "busybox-static")
_SITE = "opt/site"
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux2014_aarch64")


def _apt_options() -> list[str]:
    """Options that make apt a client for arm64 with lists of its own; the host's are not touched."""
    base = cache_dir() / "apt-arm64"
    (base / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    (base / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    options = {"APT::Architecture": "arm64", "APT::Architectures": "arm64"}
    options |= {"Dir::State::Lists": f"{base}/lists", "Dir::Cache": f"{base}/cache"}
    return [f"-o{key}={value}" for key, value in options.items()]


def _closure(options: list[str]) -> list[str]:
    """The packages that ``_PACKAGES`` need, as apt solves it for a machine that has none installed."""
    solve = [need_tool("apt-get", "apt"), *options, "-oDir::State::Status=/dev/null", "-s"]
    plan = command([*solve, "--no-install-recommends", "install", *_PACKAGES], what="solving packages for arm64")
    return re.findall(r"^Inst (\S+)", plan, re.MULTILINE)


def _merge_usr(root: Path) -> None:
    """Make /bin, /sbin and /lib links into /usr, as on an installed Debian."""
    for name in ("bin", "sbin", "lib"):
        folder = root / name
        if folder.is_dir() and not folder.is_symlink():
            shutil.copytree(folder, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(folder)
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        folder.symlink_to(f"usr/{name}")


def _python_version(root: Path) -> str:
    """The minor version of the unpacked interpreter, such as 3.11."""
    found = [path.name.removeprefix("python") for path in (root / "usr/bin").glob("python3.*")]
    versions = [name for name in found if re.fullmatch(r"3\.\d+", name)]
    if not versions:
        raise Unavailable("Debian's python3 for arm64 holds no usr/bin/python3.N")
    return versions[0]


def _install_wheels(root: Path, version: str) -> None:
    same = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    # The environment's own versions, unless another Python version in the guest may have no wheels of them.
    names = [f"{name}=={importlib.metadata.version(name)}" if same else name for name in DISTRIBUTIONS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["--target", str(root / _SITE), "--python-version", version, "--only-binary=:all:"]
    for platform in _PLATFORMS:
        pip += ["--platform", platform]
    command([*pip, *names], what="installing wheels for aarch64")
    shutil.rmtree(root / _SITE / "tests", ignore_errors=True)  # py-libnuma's, which would hide the project's
    if same:
        # Debian ships no byte code, and compiling under emulation takes a minute.
        compileall = [sys.executable, "-m", "compileall", "-q", "-s", str(root), "-p", "/"]
        command([*compileall, str(root / f"usr/lib/python{version}"), str(root / _SITE)], what="compiling")


def _image(options: list[str]) -> Path:
    sources = [Path(__file__), Path(__file__).with_name("image.py")]
    text = "".join(path.read_text() for path in sources) + sys.version
    text += "".join(f"{name}{importlib.metadata.version(name)}" for name in DISTRIBUTIONS)
    target = cache_dir() / f"arm-image-{hashlib.sha256(text.encode()).hexdigest()[:16]}.ext4"
    with locked("arm-image"):
        if target.exists():
            os.utime(target)
            return target
        root = unpack_packages(_closure(options), cache_dir() / "arm-stage", options)
        _merge_usr(root)
        for folder in ("dev", "proc", "sys", "run", "job", "root", "etc"):
            (root / folder).mkdir(exist_ok=True)
        (root / "tmp").mkdir(mode=0o1777, exist_ok=True)
        _install_wheels(root, _python_version(root))
        write_etc(root)
        make_filesystem(root, target)
        shutil.rmtree(root)
        prune("arm-image-*.ext4", keep=2)
    return target


def _refresh_lists(options: list[str]) -> None:
    """Fetch package lists for arm64, once a cache."""
    with locked("apt-arm64"):
        done = cache_dir() / "apt-arm64" / "updated"
        if not done.exists():
            command([need_tool("apt-get", "apt"), *options, "update"], what="fetching package lists for arm64")
            done.touch()


def arm_guest(topology: GuestTopology) -> Guest:
    """What boots an aarch64 topology; downloads some 80 MB the first time."""
    need_tool("qemu-system-aarch64", "qemu-system-arm")
    need_tool("mke2fs", "e2fsprogs")
    options = _apt_options()
    _refresh_lists(options)
    return Guest(topology, kernel("aarch64", options), _image(options), "/usr/bin/python3", f"/job:/{_SITE}")
