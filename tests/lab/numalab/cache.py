"""The cache folder, the kernel, and the locks that let several runs share both."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from numalab.errors import Unavailable

__all__ = ["cache_dir", "command", "kernel", "locked", "need_tool", "prune"]

_KERNEL_PACKAGES = {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"}


def cache_dir() -> Path:
    """Where kernels and images are kept: ``$NUMA_COLLECTORS_LAB_CACHE``, else the user's cache folder."""
    chosen = os.environ.get("NUMA_COLLECTORS_LAB_CACHE")
    if chosen:
        path = Path(chosen).expanduser().resolve()
    else:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        path = Path(base) / "numa_collectors" / "lab"
    path.mkdir(parents=True, exist_ok=True)
    return path


def need_tool(name: str, package: str) -> str:
    """The path of a program, also where ``sbin`` is not on the search path; raises ``Unavailable`` with the remedy."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if not found:
        raise Unavailable(f"{name} is not installed (apt-get install {package})")
    return found


def command(args: Sequence[str], *, cwd: Path | None = None, what: str) -> str:
    """Run a preparing command; its failure makes the lab unavailable and shows the end of its output."""
    result = subprocess.run(args, cwd=cwd, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        tail = (result.stderr or result.stdout).strip()[-800:]
        raise Unavailable(f"{what}: {args[0]} exited with {result.returncode}: {tail}")
    return result.stdout


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock across processes: two runs never build the same thing twice."""
    with open(cache_dir() / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune(pattern: str, keep: int) -> None:
    """Delete all but the ``keep`` most recently used matches; a running guest keeps its deleted image open."""
    found = sorted(cache_dir().glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[keep:]:
        path.unlink(missing_ok=True)


def _find_kernel(folder: Path) -> Path | None:
    found = sorted(folder.glob("boot/vmlinuz-*"))
    return found[-1] if found else None


def _kernel_package(arch: str, apt_options: Sequence[str]) -> str:
    """The package behind Debian's cloud-kernel metapackage: that kernel has ext4, NVMe and serial built in."""
    meta = _KERNEL_PACKAGES[arch]
    depends = command([need_tool("apt-cache", "apt"), *apt_options, "depends", meta], what=f"looking up {meta}")
    names = [line.split(":", 1)[1].strip() for line in depends.splitlines() if line.strip().startswith("Depends:")]
    images = [name for name in names if name.startswith("linux-image-")]
    if not images:
        raise Unavailable(f"apt knows no kernel behind {meta}; run apt-get update, or set NUMA_COLLECTORS_LAB_KERNEL")
    return images[0]


def kernel(arch: str, apt_options: Sequence[str] = ()) -> Path:
    """The kernel image: ``$NUMA_COLLECTORS_LAB_KERNEL`` (x86-64 only), the cache's, or one that apt downloads (27 MB)."""
    chosen = os.environ.get("NUMA_COLLECTORS_LAB_KERNEL")
    if chosen and arch == "x86_64":
        if not os.path.isfile(chosen):
            raise Unavailable(f"NUMA_COLLECTORS_LAB_KERNEL={chosen} is not a file")
        return Path(chosen)
    folder = cache_dir() / f"kernel-{arch}"
    with locked(f"kernel-{arch}"):
        found = _find_kernel(folder)
        if found:
            return found
        package = _kernel_package(arch, apt_options)
        unpacked = unpack_packages([package], cache_dir() / f"kernel-{arch}.new", apt_options, members=["boot"])
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
        found = _find_kernel(folder)
        if not found:
            raise Unavailable(f"{package} holds no boot/vmlinuz-*")
        return found


def unpack_packages(
    packages: Sequence[str], folder: Path, apt_options: Sequence[str] = (), members: Sequence[str] = ()
) -> Path:
    """Download Debian packages and unpack them into a fresh ``folder``; ``members`` names what to keep of its top level."""
    apt_get, dpkg = need_tool("apt-get", "apt"), need_tool("dpkg", "dpkg")
    shutil.rmtree(folder, ignore_errors=True)
    debs = folder / ".debs"
    debs.mkdir(parents=True)
    command([apt_get, *apt_options, "download", *packages], cwd=debs, what=f"downloading {len(packages)} packages")
    for deb in sorted(debs.glob("*.deb")):
        command([dpkg, "-x", str(deb), str(folder)], what=f"unpacking {deb.name}")
    shutil.rmtree(debs)
    for path in folder.iterdir():
        if members and path.name not in members:
            shutil.rmtree(path)
    return folder
