"""The x86-64 guest's disk: this interpreter, the packages that guest tests import, a shell, and an init.

Everything keeps its absolute path, so that interpreters and scripts of the environment work unchanged inside.  The
library and its tests are *not* in the image; they travel with each job, so that an edit needs no new image.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from numalab.cache import cache_dir, command, locked, need_tool, prune
from numalab.errors import Unavailable

__all__ = ["DISTRIBUTIONS", "INIT", "guest_python", "image", "make_filesystem"]

# What guest tests may import; their dependencies follow.  Never torch: importing it takes 20 seconds under emulation.
DISTRIBUTIONS = ("pytest", "pytest-timeout", "numpy", "psutil", "pydantic", "PyYAML", "py-libnuma")

_STDLIB_LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "site-packages"}

# Opened by name at run time, so that no ELF header names them.
_LOADED_BY_NAME = ("libnuma.so.1", "libgcc_s.so.1", "libstdc++.so.6")

INIT = """#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/run/tmp
[ -e /usr/bin/poweroff ] || /bin/busybox --install -s /usr/bin
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm /run /job
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mkdir -p /run/tmp
mount -t cgroup2 cgroup /sys/fs/cgroup
hostname guest
exec >/dev/$lab_out 2>&1 </dev/null
stty -opost -F /dev/$lab_out
disk() {
  tries=0
  while [ $tries -lt 100 ]; do
    for d in /sys/block/nvme*; do
      [ "$(cat $d/nsid 2>/dev/null)" = "$1" ] && { echo /dev/${d##*/}; return; }
    done
    tries=$((tries + 1)); usleep 50000
  done
}
echo LAB-BOOT $(cut -d' ' -f1 /proc/uptime)
[ -s /etc/ld.so.cache ] || ldconfig
job=$(disk 2) results=$(disk 3)
mkdir -p /run/results
tar -xf $job -C /job && cd /job && sh job.sh
code=$?
tar -cf $results -C /run results
sync
echo LAB-EXIT $code $(cut -d' ' -f1 /proc/uptime)
poweroff -f
"""


def guest_python() -> str:
    """The interpreter's path, the same on the host and in the guest."""
    return sys.executable


def _requirement_name(requirement: str) -> str | None:
    """The name in a requirement; None where a marker ties it to an extra."""
    text, _, marker = requirement.partition(";")
    match = re.match(r"[A-Za-z0-9._-]+", text.strip())
    return match.group(0) if match and "extra" not in marker else None


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions among ``DISTRIBUTIONS`` and everything they require."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(DISTRIBUTIONS)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # required on another platform or Python version only
            if name in {wanted.lower() for wanted in DISTRIBUTIONS}:
                raise Unavailable(f"{name} is not installed in this environment ({sys.prefix})") from None
            continue
        found[name] = distribution
        waiting += [required for line in distribution.requires or () if (required := _requirement_name(line))]
    return found


def _key(distributions: dict[str, importlib.metadata.Distribution]) -> str:
    parts = [sys.version, sys.prefix, sys.base_prefix, Path(__file__).read_text()]
    parts += [f"{name}=={found.version}" for name, found in sorted(distributions.items())]
    for tool in (need_tool("busybox", "busybox-static"), need_tool("numactl", "numactl")):
        parts.append(f"{tool} {os.stat(tool).st_mtime_ns} {os.stat(tool).st_size}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


class Stage:
    """A folder that becomes the guest's root; files are hard-linked under their own absolute path where possible."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in (
            "usr/bin",
            "usr/sbin",
            "usr/lib",
            "usr/lib64",
            "etc",
            "dev",
            "proc",
            "sys",
            "run",
            "job",
            "root",
        ):
            (root / folder).mkdir(parents=True)
        (root / "tmp").mkdir(mode=0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")

    def inside(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def put(self, path: Path) -> None:
        """Stage one file, or one symbolic link together with what it leads to."""
        target = self.inside(path)
        if os.path.lexists(target):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            link = os.readlink(path)
            target.symlink_to(link)
            self.put(Path(os.path.normpath(path.parent / link)))
        elif path.is_dir():
            target.mkdir()
        else:
            try:
                os.link(path, target)
            except OSError:  # another file system, or hard links are forbidden there
                shutil.copy2(path, target)

    def put_tree(self, folder: Path, left_out: Iterable[str] = ()) -> None:
        """Stage a folder; ``left_out`` are names directly below it."""
        skip = set(left_out)
        for current, folders, files in os.walk(folder):
            if Path(current) == folder:
                folders[:] = [name for name in folders if name not in skip and not name.startswith("config-")]
            for name in files:
                self.put(Path(current) / name)


def _stage_python(stage: Stage, distributions: Iterable[importlib.metadata.Distribution]) -> None:
    base = Path(sys.base_prefix)
    for interpreter in sorted((base / "bin").glob("python*")):
        if not interpreter.name.endswith("-config"):
            stage.put(interpreter)
    stage.put_tree(Path(sysconfig.get_path("stdlib")), _STDLIB_LEFT_OUT)
    prefix = Path(sys.prefix)
    if prefix != base:
        stage.put(prefix / "pyvenv.cfg")
        for interpreter in sorted((prefix / "bin").glob("python*")):
            stage.put(interpreter)
    for distribution in distributions:
        for file in distribution.files or ():
            path = Path(os.path.normpath(str(distribution.locate_file(file))))
            top = file.parts[0]
            # py-libnuma installs a top-level "tests"; numpy's own tests are a fifth of it.
            if top != "tests" and not (top == "numpy" and "tests" in file.parts) and path.is_file():
                stage.put(path)


def _elf_files(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink() and (".so" in path.name or os.access(path, os.X_OK)):
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def _stage_libraries(stage: Stage) -> None:
    """Stage the closure of shared libraries, as the host's dynamic linker resolves it."""
    by_name = subprocess.run(
        [need_tool("ldconfig", "libc-bin"), "-p"], capture_output=True, text=True, check=True
    ).stdout
    for name in _LOADED_BY_NAME:
        match = re.search(rf"^\s*{re.escape(name)} .*x86-64.* => (\S+)$", by_name, re.MULTILINE)
        if not match:
            raise Unavailable(f"{name} is not installed (apt-get install libnuma1 libgcc-s1 libstdc++6)")
        stage.put(Path(os.path.realpath(match.group(1))))
        if not os.path.lexists(stage.inside(Path(match.group(1)))):
            stage.put(Path(match.group(1)))
    # Linked files are asked for at their place on the host, where their run paths lead somewhere.
    places = [str(Path("/") / path.relative_to(stage.root)) for path in _elf_files(stage.root)]
    listing = subprocess.run(["ldd", *places], capture_output=True, text=True, check=False).stdout
    for found in set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", listing, re.MULTILINE)):
        stage.put(Path(found))


def _stage_system(stage: Stage) -> None:
    busybox = need_tool("busybox", "busybox-static")
    shutil.copy2(busybox, stage.root / "usr/bin/busybox")
    probe = subprocess.run(["ldd", busybox], capture_output=True, text=True, check=False)
    if "=>" in probe.stdout:
        raise Unavailable("busybox is dynamically linked (apt-get install busybox-static)")
    numactl = Path(need_tool("numactl", "numactl"))
    stage.put(numactl)
    ldconfig = Path(need_tool("ldconfig", "libc-bin"))
    real = ldconfig.with_name("ldconfig.real")  # some distributions wrap the static program in a script
    shutil.copy2(real if real.exists() else ldconfig, stage.root / "usr/sbin/ldconfig")
    for applet in command([busybox, "--list"], what="listing busybox's applets").split():
        link = stage.root / "usr/bin" / applet
        if not os.path.lexists(link) and applet != "busybox":
            link.symlink_to("busybox")


def write_etc(root: Path) -> None:
    """The few files that user and host look-ups want, and the init."""
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    init = root / "usr/sbin/lab-init"
    init.write_text(INIT)
    init.chmod(0o755)


def make_filesystem(root: Path, target: Path) -> None:
    """Make a sparse ext4 image of ``root``; needs neither root rights nor a mount."""
    used = int(command(["du", "-sm", str(root)], what="measuring the image").split()[0])
    temporary = target.with_suffix(f".{os.getpid()}.new")
    features = "^has_journal,^resize_inode,^metadata_csum"
    mke2fs = [need_tool("mke2fs", "e2fsprogs"), "-q", "-F", "-t", "ext4", "-O", features, "-m", "0", "-N", "60000"]
    command(
        [*mke2fs, "-b", "4096", "-d", str(root), str(temporary), f"{used * 9 // 8 + 160}M"], what="making the image"
    )
    temporary.rename(target)


def image() -> Path:
    """The cached guest image of this environment, built if need be (a few seconds)."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Unavailable(
            f"the guest is made from this environment and needs Linux on x86_64, not {platform.machine()}"
        )
    need_tool("mke2fs", "e2fsprogs")
    distributions = _distributions()
    target = cache_dir() / f"image-{_key(distributions)}.ext4"
    with locked("image"):
        if target.exists():
            os.utime(target)
            return target
        folder = cache_dir() / "stage"
        shutil.rmtree(folder, ignore_errors=True)
        stage = Stage(folder)
        _stage_python(stage, distributions.values())
        _stage_system(stage)
        _stage_libraries(stage)
        write_etc(folder)
        command([need_tool("ldconfig", "libc-bin"), "-r", str(folder)], what="indexing the guest's libraries")
        make_filesystem(folder, target)
        shutil.rmtree(folder)
        prune("image-*.ext4", keep=3)
    return target
